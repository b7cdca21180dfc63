"""What people see: the start and end of a run and what was loaded; an error about the config names the key."""

from __future__ import annotations

import contextlib
import logging
import warnings

import pytest
import torch
import torch.distributed as dist

import deepspeed
from tests.clients import tiny
from tests.clients.trainers import arguments, auto
from tests.harness import ranks


@contextlib.contextmanager
def noise():
    """Collects what this library logs, and warnings that it raises or causes."""
    heard: list[str] = []

    class Listen(logging.Handler):
        def emit(self, record):
            heard.append(f"{record.levelname}: {record.getMessage()}")

    handler = Listen()
    deepspeed.utils.logger.addHandler(handler)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        yield heard
    deepspeed.utils.logger.removeHandler(handler)
    ours = [str(each) for each in raised if "/deepspeed/" in each.filename.replace("integrations/deepspeed", "")]
    caused = [str(each) for each in raised if issubclass(each.category, (FutureWarning, DeprecationWarning))]
    heard += ours + [each for each in caused if "torch" in each]


def trainer(folder, config, **options):
    from transformers import Trainer

    made = arguments(folder, deepspeed=config, **options)
    return Trainer(model=tiny.llama(), args=made, train_dataset=tiny.tokens(), eval_dataset=tiny.tokens(4))


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks(2)
def test_a_usual_run_is_quiet(tmp_path, stage, bf16):
    config = auto(stage, optimizer=True, scheduler=True, stage3_gather_16bit_weights_on_model_save=True)
    given = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    with noise() as heard:
        made = trainer(tmp_path, config, bf16=bf16, gradient_accumulation_steps=2, warmup_steps=2, **given)
        made.train()
        made.save_model(str(tmp_path / "saved"))
        made.accelerator.free_memory()
    assert heard == []  # not even the start of a run: Trainer sets this library's level to its own, "warning"


@ranks(2)
def test_a_usual_run_says_that_it_began_what_it_loaded_and_that_it_ended(tmp_path):
    """Without a Trainer, which sets this library's level to "warning"."""
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3}}
    with noise() as heard:
        engine, *_ = deepspeed.initialize(model=tiny.llama(), config=config)
        ids = torch.arange(16).view(2, 8)
        for _ in range(2):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        engine.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path)
        engine.destroy()
    said = ["parameters, ", "was loaded from", "ended at step 2"] if dist.get_rank() == 0 else []
    assert len(heard) == len(said), heard
    for line, words in zip(heard, said, strict=True):
        assert line.startswith("NOTICE")
        assert words in line


@ranks(2)
def test_a_misspelt_key_is_named(tmp_path):
    made = trainer(tmp_path, auto(3, reduce_buket_size=1))
    with pytest.raises(deepspeed.DeepSpeedConfigError, match=r"zero_optimization\.reduce_buket_size") as caught:
        made.train()
    assert "reduce_bucket_size" in str(caught.value)  # what was meant


@ranks(2)
def test_a_wrong_value_is_named(tmp_path):
    made = trainer(tmp_path, {**auto(2), "bf16": {"enabled": False, "immediate_grad_update": "sometimes"}})
    with pytest.raises(deepspeed.DeepSpeedConfigError, match=r"bf16\.immediate_grad_update"):
        made.train()


@ranks(2)
def test_a_wrong_optimizer_parameter_is_named(tmp_path):
    config = auto(2)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "bettas": [0.9, 0.99]}}
    made = trainer(tmp_path, config)
    with pytest.raises(deepspeed.DeepSpeedConfigError, match=r"optimizer\.params\.bettas"):
        made.train()


@ranks(2)
def test_the_client_finds_what_it_looks_for():
    """The version is recent enough for every check of the clients."""
    from accelerate.utils import is_deepspeed_available
    from transformers.integrations import is_deepspeed_available as by_transformers

    assert is_deepspeed_available()
    assert by_transformers()
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    assert callable(UlyssesSPAttentionHF.register_with_transformers)
    assert callable(deepspeed.tp_model_init)
    from deepspeed.compression.compress import init_compression

    assert callable(init_compression)
    assert not torch.cuda.is_initialized()
