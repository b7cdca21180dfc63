"""LoRA over a frozen model that stage 3 shards: adapters train, the base stays as it is in memory and on disk."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import deepspeed
from tests.clients import tiny
from tests.clients.trainers import arguments, auto, column, forget_clients
from tests.harness import ranks


def adapted(model, **options):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(11)
    given = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    return get_peft_model(model, LoraConfig(**{**given, **options}))


def base(folder):
    """A checkpoint on disk."""
    if dist.get_rank() == 0:
        tiny.llama(seed=3).save_pretrained(folder / "base")
    dist.barrier()
    return folder / "base"


def trainer(folder, path, config, adapter=None, **options):
    from transformers import AutoModelForCausalLM, Trainer

    made = arguments(folder, deepspeed=config, **options)
    model = adapted(AutoModelForCausalLM.from_pretrained(path), **(adapter or {}))
    return Trainer(model=model, args=made, train_dataset=tiny.tokens())


@pytest.mark.parametrize("stage", [2, 3])
@ranks(2)
def test_losses_are_those_of_a_plain_run(tmp_path, stage):
    path = base(tmp_path)
    plain = trainer(tmp_path, path, None)
    plain.train()
    made = trainer(tmp_path, path, auto(stage))
    made.train()
    assert column(made) == pytest.approx(column(plain), abs=1e-5)
    counted = made.model.get_nb_trainable_parameters()
    assert counted == plain.model.get_nb_trainable_parameters()
    trained = sum(p.numel() for group in made.model_wrapped.basic_optimizer.param_groups for p in group["params"])
    assert trained < counted[0]  # this rank's part of the adapters alone


@ranks(2)
def test_modules_to_save_are_copied_from_shards(tmp_path):
    path = base(tmp_path)
    adapter = {"modules_to_save": ["lm_head"]}
    plain = trainer(tmp_path, path, None, adapter)
    plain.train()
    made = trainer(tmp_path, path, auto(3), adapter)
    made.train()
    assert column(made) == pytest.approx(column(plain), abs=1e-5)


@ranks(2)
def test_adapters_are_saved_whole_and_loaded_again(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    path = base(tmp_path)
    made = trainer(tmp_path, path, auto(3, stage3_gather_16bit_weights_on_model_save=True))
    made.train()
    made.save_model(str(tmp_path / "adapter"))
    dist.barrier()
    sample = {name: torch.tensor(value).unsqueeze(0) for name, value in tiny.tokens(1, seed=8)[0].items()}
    made.model_wrapped.eval()
    with torch.no_grad():
        expected = made.model_wrapped(**sample).loss
    forget_clients()
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(**sample).loss, expected)


@ranks(2)
def test_training_resumes_without_the_frozen_weights(tmp_path):
    path = base(tmp_path)
    given = {"save_strategy": "steps", "save_steps": 2}
    straight = trainer(tmp_path / "straight", path, auto(3), **given)
    straight.train()
    resumed = trainer(tmp_path / "resumed", path, auto(3), **given)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-2"))
    assert column(resumed) == column(straight)


@ranks(2)
def test_whole_gradients_for_importance_scores(tmp_path):
    """AdaLoRA asks for the gradients of sharded parameters between backward and step."""
    model = adapted(tiny.llama())
    reference = adapted(tiny.llama())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={**config})
    sample = {name: torch.tensor(value).unsqueeze(0) for name, value in tiny.tokens(1, seed=8)[0].items()}
    engine.backward(engine(**sample).loss)
    reference(**sample).loss.backward()
    seen = 0
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        if param.requires_grad:
            grad = deepspeed.utils.safe_get_full_grad(param)
            torch.testing.assert_close(grad, expected.grad, msg=name)
            seen += 1
    assert seen == 8
