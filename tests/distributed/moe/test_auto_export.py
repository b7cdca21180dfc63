"""State dicts of models with spread experts: whole where all ranks copy them for a file, an error where one does."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.errors import UsageError
from deepspeed.moe import placement as exporting
from tests.distributed.moe.models import Model, StackedModel
from tests.distributed.moe.test_auto import config, tokens_of
from tests.harness import shared_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def same(found, expected):
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)


def plain_config():
    made = config()
    del made["expert_parallel"]
    return made


@shared_ranks(2)
def test_all_ranks_together():
    torch.manual_seed(0)
    model = StackedModel()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    engine, *_ = deepspeed.initialize(model=model, config=config(1))
    local = model.state_dict()
    rank = dist.get_rank()
    torch.testing.assert_close(local["experts.down_proj"], expected["experts.down_proj"][2 * rank : 2 * rank + 2])
    whole = clone_tensors_for_torch_save({"model": local, "step": 3})
    same(whole["model"], expected)
    assert whole["step"] == 3
    assert whole["model"]["experts.down_proj"].data_ptr() != local["experts.down_proj"].data_ptr()
    same(clone_tensors_for_torch_save(engine.module_state_dict()), expected)
    outer = torch.nn.Sequential(model)  # somebody's module around the engine's
    same(
        clone_tensors_for_torch_save(outer.state_dict()),
        {f"0.{name}": value for name, value in expected.items()},
    )
    engine.destroy()
    assert "whole" not in model.state_dict()._metadata[""], "nobody is left to ask"


@shared_ranks(2)
def test_layers_of_experts():
    """Experts of `MoE` get their numbers in the whole model; a layer of which each rank has all stays."""
    torch.manual_seed(dist.get_rank())
    model = Model(2, 1)
    engine, *_ = deepspeed.initialize(model=model, config=plain_config())
    expected = engine.zero3_consolidated_16bit_state_dict()
    whole = clone_tensors_for_torch_save(model.state_dict())
    if dist.get_rank() == 0:
        same(clone_tensors_for_torch_save(expected), expected)  # by itself: it is whole
        same(whole, expected)
        begin = "first.deepspeed_moe.experts.deepspeed_experts."
        assert {int(name.removeprefix(begin)[0]) for name in whole if name.startswith(begin)} == {0, 1, 2, 3}
    engine.destroy()


@shared_ranks(2)
def test_one_rank_alone_is_told():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "default_exchange", functools.partial(exporting.default_exchange, wait=1.0))
        torch.manual_seed(0)
        model = StackedModel()
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        engine, *_ = deepspeed.initialize(model=model, config=config())
        if dist.get_rank() == 0:
            with pytest.raises(UsageError, match=r"experts of rank 0 alone.*\b1\b.*engine\.save_16bit_model\(\)"):
                clone_tensors_for_torch_save(model.state_dict())
        dist.barrier()
        same(clone_tensors_for_torch_save(model.state_dict()), expected)
        engine.destroy()


@shared_ranks(2)
def test_sharded_parameters_stay_what_they_were():
    model = StackedModel()
    engine, *_ = deepspeed.initialize(model=model, config=config(3))
    assert "whole" not in model.state_dict()._metadata[""]
    engine.destroy()


@shared_ranks(1)
def test_one_rank_has_everything():
    model = StackedModel()
    engine, *_ = deepspeed.initialize(model=model, config=config(size=1))
    same(clone_tensors_for_torch_save(model.state_dict()), model.state_dict())
    engine.destroy()


@shared_ranks(2, timeout=300)
def test_accelerate():
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs

    from tests.clients.trainers import forget_clients
    from tests.distributed.moe.families import model_of

    forget_clients()
    model = model_of("mixtral")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {**config(1), "gradient_accumulation_steps": 1}
    del given["optimizer"]
    made = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=given), kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]
    )
    engine, optimizer = made.prepare(model, optimizer)
    tokens = tokens_of(0, uneven=False)[dist.get_rank()]
    made.backward(engine(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    found, expected = made.get_state_dict(engine), engine.module_state_dict()
    same(found, expected)
    assert expected["model.layers.0.mlp.experts.down_proj"].shape[0] == 4
    engine.destroy()


@shared_ranks(2, timeout=300)
def test_trainer(tmp_path):
    from transformers import MixtralForCausalLM, Trainer

    from tests.clients.trainers import arguments, auto
    from tests.distributed.moe.families import model_of

    rows = [{"input_ids": row, "labels": row} for row in torch.randint(1, 32, (8, 5))]
    section = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
    trainer = Trainer(
        model=model_of("mixtral"),
        args=arguments(tmp_path, deepspeed=auto(1, optimizer=True) | section, max_steps=2),
        train_dataset=rows,
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    expected = trainer.model_wrapped.module_state_dict()
    if dist.get_rank() == 0:
        again = MixtralForCausalLM.from_pretrained(tmp_path / "saved")
        same(again.state_dict(), expected)
    dist.barrier()
