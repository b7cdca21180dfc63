"""Trainer with `deepspeed=`: the same losses as without, whatever shards what."""

from __future__ import annotations

import json

import pytest
import torch

from tests.clients import tiny
from tests.clients.trainers import arguments, auto, column
from tests.harness import ranks


def train(folder, config=None, model=None, **options):
    from transformers import Trainer

    made = arguments(folder, deepspeed=config, **options)
    trainer = Trainer(model=model or tiny.llama(), args=made, train_dataset=tiny.tokens(), eval_dataset=tiny.tokens(6))
    trainer.train()
    return trainer


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks(2)
def test_losses_are_those_of_a_plain_run(tmp_path, stage):
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "warmup_steps": 2, "weight_decay": 0.1}
    plain = train(tmp_path, **options)
    trained = train(tmp_path, auto(stage), **options)
    assert type(trained.model_wrapped).__name__ == "DeepSpeedEngine"
    assert type(plain.model_wrapped).__name__ != "DeepSpeedEngine"
    assert column(trained) == pytest.approx(column(plain), abs=1e-5)
    assert column(trained, "grad_norm") == pytest.approx(column(plain, "grad_norm"), abs=1e-5)
    assert column(trained, "learning_rate") == pytest.approx(column(plain, "learning_rate"))
    assert max(column(plain, "grad_norm")) > 0.5  # it was clipped


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks(2)
def test_optimizer_and_schedule_of_the_config(tmp_path, stage):
    path = tmp_path / f"rank{torch.distributed.get_rank()}.json"
    path.write_text(json.dumps(auto(stage, optimizer=True, scheduler=True)))
    given = {"learning_rate": 5e-3, "max_steps": 6, "warmup_steps": 2, "weight_decay": 0.1}
    trained = train(tmp_path, str(path), **given)
    assert column(trained, "learning_rate") == pytest.approx([0, 0.0025, 0.005, 0.00375, 0.0025, 0.00125])
    config = trained.model_wrapped.config
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["optimizer"]["params"]["weight_decay"] == 0.1
    assert config["zero_optimization"]["reduce_bucket_size"] == 256
    base = train(tmp_path, auto(0, optimizer=True, scheduler=True), **given)
    assert column(trained) == pytest.approx(column(base), abs=1e-5)


@ranks(2)
def test_optimizer_of_the_config_with_a_schedule_of_the_client(tmp_path):
    given = {"lr_scheduler_type": "cosine", "warmup_steps": 1}
    plain = train(tmp_path, **given)
    trained = train(tmp_path, auto(3, optimizer=True), **given)
    # the engine moves the schedule on in its step, before the client reads it
    assert column(trained, "learning_rate")[:-1] == pytest.approx(column(plain, "learning_rate")[1:])
    assert column(trained) == pytest.approx(column(plain), abs=1e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks(2)
def test_bf16(tmp_path, stage):
    trained = train(tmp_path, auto(stage), bf16=True, gradient_accumulation_steps=2)
    base = train(tmp_path, auto(0), bf16=True, gradient_accumulation_steps=2)
    assert trained.model_wrapped.config["bf16"]["enabled"] is True
    assert all(param.dtype == torch.bfloat16 for param in trained.model.parameters())
    assert column(trained) == pytest.approx(column(base), abs=2e-3)
    assert column(trained)[0] == pytest.approx(3.87, abs=0.05)  # that of fp32


@pytest.mark.parametrize("stage", [2, 3])
@ranks(2)
def test_evaluation_and_prediction_in_between(tmp_path, stage):
    given = {"eval_strategy": "steps", "eval_steps": 1}
    plain, trained = train(tmp_path, **given), train(tmp_path, auto(stage), **given)
    assert column(trained) == pytest.approx(column(plain), abs=1e-5)
    assert column(trained, "eval_loss") == pytest.approx(column(plain, "eval_loss"), abs=1e-5)
    expected, found = plain.predict(tiny.tokens(5)), trained.predict(tiny.tokens(5))
    assert found.predictions.shape == (5, 8, tiny.VOCABULARY)
    assert found.predictions == pytest.approx(expected.predictions, abs=1e-4)


@pytest.mark.parametrize("reentrant", [False, True])
@ranks(2)
def test_gradient_checkpointing_at_stage_3(tmp_path, reentrant):
    given = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    plain = train(tmp_path)
    trained = train(tmp_path, auto(3, stage3_param_persistence_threshold=0), **given)
    assert column(trained) == pytest.approx(column(plain), abs=1e-5)


@ranks(2)
def test_tied_embeddings_at_stage_3(tmp_path):
    plain = train(tmp_path, model=tiny.llama(tie_word_embeddings=True))
    trained = train(tmp_path, auto(3), model=tiny.llama(tie_word_embeddings=True))
    assert column(trained) == pytest.approx(column(plain), abs=1e-5)


@ranks(2)
def test_evaluation_before_training(tmp_path):
    """At stage 3 the client makes an engine without optimizer for it; another one trains the same model."""
    from transformers import Trainer

    def trainer(model, config):
        made = arguments(tmp_path, deepspeed=config)
        return Trainer(model=model, args=made, train_dataset=tiny.tokens(), eval_dataset=tiny.tokens(6, seed=5))

    model = tiny.llama()
    expected = [trainer(tiny.llama(), None).evaluate()["eval_loss"], *column(train(tmp_path))]
    found = [trainer(model, auto(3)).evaluate()["eval_loss"]]
    second = trainer(model, auto(3))
    second.train()
    assert [*found, *column(second)] == pytest.approx(expected, abs=1e-5)


@ranks(2)
def test_one_trainer_evaluates_then_trains_twice(tmp_path):
    """Each `train()` begins a new engine and, as the client does under DeepSpeed, a new optimizer."""
    from transformers import Trainer

    def trainer(model, config=None, **options):
        made = arguments(tmp_path, deepspeed=config, **options)
        return Trainer(model=model, args=made, train_dataset=tiny.tokens(), eval_dataset=tiny.tokens(6, seed=5))

    model, expected = tiny.llama(), [trainer(tiny.llama()).evaluate()["eval_loss"]]
    for _ in range(2):
        plain = trainer(model)
        plain.train()
        expected += [*column(plain), plain.evaluate()["eval_loss"]]
    assert expected[0] != pytest.approx(expected[5], abs=1e-2)
    for stage, optimizer in ((3, False), (3, True), (2, False)):
        made = trainer(tiny.llama(), auto(stage, optimizer=optimizer, stage3_param_persistence_threshold=0))
        found = [made.evaluate()["eval_loss"]] if stage == 3 else expected[:1]
        for _ in range(2):
            made.train()
            found += [*column(made), made.evaluate()["eval_loss"]]
        assert type(made.model_wrapped).__name__ == "DeepSpeedEngine"
        assert found == pytest.approx(expected, abs=1e-5), (stage, optimizer)
