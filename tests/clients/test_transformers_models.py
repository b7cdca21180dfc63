"""Models of Transformers under stage 3: constructed, loaded, resized, generating, saved."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import deepspeed
from tests.clients import tiny
from tests.clients.trainers import arguments, auto, column, forget_clients
from tests.harness import ranks

SHARDED = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def saved(folder, **options):
    """A checkpoint on disk, and its values."""
    model = tiny.llama(seed=3, **options)
    if dist.get_rank() == 0:
        model.save_pretrained(folder / "model")
    dist.barrier()
    return folder / "model", {name: value.clone() for name, value in model.state_dict().items()}


def whole(model):
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def plain_config(stage=3, **zero):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, **zero},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "bf16": {"enabled": "auto"},
    }


@pytest.mark.parametrize("tied", [False, True])
@ranks(2)
def test_from_pretrained_is_sharded_at_once(tmp_path, tied):
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    path, expected = saved(tmp_path, tie_word_embeddings=tied)
    forget_clients()
    kept = HfDeepSpeedConfig(plain_config())
    model = AutoModelForCausalLM.from_pretrained(path)
    assert kept.is_zero3()
    assert all(param.numel() == 0 and param.ds_numel > 0 for param in model.parameters())
    assert tied == (model.lm_head.weight is model.model.embed_tokens.weight)
    found = whole(model)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


@ranks(2)
def test_missing_weights_are_initialized(tmp_path):
    from transformers import LlamaForSequenceClassification
    from transformers.integrations import HfDeepSpeedConfig

    path, expected = saved(tmp_path)
    forget_clients()
    kept = HfDeepSpeedConfig(plain_config())
    torch.manual_seed(dist.get_rank())
    model = LlamaForSequenceClassification.from_pretrained(path, num_labels=3)
    assert kept is not None
    found = whole(model)
    assert found["score.weight"].shape == (3, 16)
    assert 0.005 < found["score.weight"].std() < 0.05  # initializer_range is 0.02
    first = found["score.weight"].clone()
    dist.broadcast(first, src=0)
    torch.testing.assert_close(found["score.weight"], first)
    torch.testing.assert_close(found["model.norm.weight"], expected["model.norm.weight"])


@ranks(2)
def test_embeddings_are_resized(tmp_path):
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    path, expected = saved(tmp_path)
    forget_clients()
    kept = HfDeepSpeedConfig(plain_config())
    model = AutoModelForCausalLM.from_pretrained(path)
    model.resize_token_embeddings(tiny.VOCABULARY + 6, mean_resizing=False)
    assert kept is not None
    found = whole(model)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert found[name].shape == (tiny.VOCABULARY + 6, 16)
        torch.testing.assert_close(found[name][: tiny.VOCABULARY], expected[name])


@ranks(2)
def test_a_loaded_model_trains_as_a_plain_one(tmp_path):
    """The config is known before the model is made, so the client makes it of shards."""
    from transformers import AutoModelForCausalLM, Trainer

    path, _ = saved(tmp_path)

    def run(config):
        made = arguments(tmp_path, deepspeed=config)
        model = AutoModelForCausalLM.from_pretrained(path)
        assert (config is not None) == all(hasattr(param, "ds_numel") for param in model.parameters())
        trainer = Trainer(model=model, args=made, train_dataset=tiny.tokens())
        trainer.train()
        return column(trainer)

    assert run(auto(3)) == pytest.approx(run(None), abs=1e-5)


@ranks(2)
def test_generate_with_ranks_that_end_at_different_lengths(tmp_path):
    model = tiny.llama(seed=4)
    prompt = torch.tensor([[1, 5 + dist.get_rank(), 7]])
    wanted = 4 + 5 * dist.get_rank()
    expected = model.generate(prompt, max_new_tokens=wanted, do_sample=False, eos_token_id=None)
    engine, *_ = deepspeed.initialize(model=tiny.llama(seed=4), config=SHARDED)
    engine.eval()
    found = engine.module.generate(prompt, max_new_tokens=wanted, do_sample=False, eos_token_id=None, synced_gpus=True)
    assert found.shape == (1, 3 + wanted)
    assert found.tolist() == expected.tolist()
    assert all(param.numel() == 0 for param in engine.module.parameters())


@pytest.mark.parametrize("stage", [2, 3])
@ranks(2)
def test_save_model_writes_the_whole_model(tmp_path, stage):
    from transformers import AutoModelForCausalLM, Trainer

    made = arguments(tmp_path, deepspeed=auto(stage, stage3_gather_16bit_weights_on_model_save=True))
    trainer = Trainer(model=tiny.llama(), args=made, train_dataset=tiny.tokens())
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    dist.barrier()
    expected = whole(trainer.model)
    forget_clients()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)
