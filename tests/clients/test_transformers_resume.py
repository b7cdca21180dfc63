"""Trainer's checkpoints: saved, resumed, the best one loaded, converted to one file."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import deepspeed
from tests.clients import tiny
from tests.clients.trainers import arguments, auto, column, forget_clients
from tests.harness import ranks

GIVEN = {
    "save_strategy": "steps",
    "save_steps": 2,
    "gradient_accumulation_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "max_steps": 4,
}


def trainer(folder, config, **options):
    from transformers import Trainer

    made = arguments(folder, deepspeed=config, **{**GIVEN, **options})
    return Trainer(model=tiny.llama(), args=made, train_dataset=tiny.tokens(32), eval_dataset=tiny.tokens(4, seed=5))


def whole(model):
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("own", [False, True], ids=["schedule of the client", "schedule of the config"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks(2)
def test_resumed_training_goes_on_as_if_never_interrupted(tmp_path, stage, own):
    config = auto(stage, optimizer=own, scheduler=own)
    straight = trainer(tmp_path / "straight", config)
    straight.train()
    assert (tmp_path / "straight" / "checkpoint-2" / "latest").read_text() == "global_step2"
    resumed = trainer(tmp_path / "resumed", auto(stage, optimizer=own, scheduler=own))
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-2"))
    assert column(resumed) == column(straight)
    assert column(resumed, "learning_rate") == column(straight, "learning_rate")
    expected, found = whole(straight.model), whole(resumed.model)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("stage", [2, 3])
@ranks(2)
def test_the_best_model_is_loaded_at_the_end(tmp_path, stage):
    given = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    made = trainer(tmp_path, auto(stage), learning_rate=0.5, **given)
    made.train()
    losses = column(made, "eval_loss")
    assert losses[0] > losses[1]  # so the first checkpoint is to come back
    assert made.state.best_model_checkpoint.endswith("checkpoint-2")
    assert made.evaluate()["eval_loss"] == pytest.approx(losses[0], abs=1e-6)


@ranks(2)
def test_weights_that_are_not_gathered_are_saved_as_a_checkpoint(tmp_path):
    """Without stage3_gather_16bit_weights_on_model_save the client writes the engine's own files instead."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    config = auto(3, stage3_gather_16bit_weights_on_model_save=False)
    made = trainer(tmp_path, config, save_strategy="no", max_steps=2)
    made.train()
    made.save_model(str(tmp_path / "saved"))
    dist.barrier()
    found = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "saved"))
    for name, value in whole(made.model).items():
        torch.testing.assert_close(found[name], value)
    forget_clients()
