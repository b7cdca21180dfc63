"""Trainer with a config that splits layers: the client's own path for it, from `tp_model_init` to the saved model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.clients import tiny
from tests.clients.trainers import arguments, auto, column
from tests.harness import ranks


@pytest.mark.parametrize("stage", [0, 2])
@ranks(2)
def test_trainer_trains_and_saves_whole_weights(tmp_path, stage):
    from safetensors.torch import load_file
    from transformers import Trainer

    config = auto(stage, stage3_gather_16bit_weights_on_model_save=True)
    config["tensor_parallel"] = {"autotp_size": 2}
    made = arguments(tmp_path, deepspeed=config, max_steps=4)
    model = tiny.llama()
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    trainer = Trainer(model=model, args=made, train_dataset=tiny.tokens(), eval_dataset=tiny.tokens(6))
    trainer.train()
    engine = trainer.model_wrapped
    assert engine.train_batch_size() == 2, "both ranks see the same samples"
    weight = engine.module.model.layers[0].mlp.up_proj.weight
    assert weight.shape[0] * 2 == shapes["model.layers.0.mlp.up_proj.weight"][0]
    losses = column(trainer)
    assert losses[-1] < losses[0]
    both = [None, None]
    dist.all_gather_object(both, losses)
    assert both[0] == both[1]
    assert trainer.evaluate()["eval_loss"] < losses[0]
    trainer.save_model(str(tmp_path / "model"))
    dist.barrier()
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert {name: value.shape for name, value in saved.items()}.items() <= shapes.items()
    whole = engine.module_state_dict()
    assert all(torch.equal(value, whole[name]) for name, value in saved.items())
