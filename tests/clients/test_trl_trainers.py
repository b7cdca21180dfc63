"""SFTTrainer and DPOTrainer under stages 2 and 3: the losses of a plain run; a second engine for the reference."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import deepspeed
from tests.clients import tiny
from tests.clients.trainers import arguments, auto, column
from tests.harness import ranks


def texts(count=16):
    from datasets import Dataset

    return Dataset.from_dict({"text": tiny.sentences(count)})


def preferences(folder, count=16):
    """On disk: what the client computes once for all ranks, it leaves beside the files."""
    from datasets import Dataset, load_from_disk

    if dist.get_rank() == 0 and not (folder / "data").exists():
        answers = [[f" {text}" for text in tiny.sentences(count, words=4, seed=seed)] for seed in (5, 6)]
        data = {"prompt": tiny.sentences(count, words=3), "chosen": answers[0], "rejected": answers[1]}
        Dataset.from_dict(data).save_to_disk(folder / "data")
    dist.barrier()
    return load_from_disk(folder / "data")


def model(folder):
    """From a folder, so that the client can make the reference from there too."""
    from transformers import AutoModelForCausalLM

    if dist.get_rank() == 0 and not (folder / "model").exists():
        tiny.llama().save_pretrained(folder / "model")
    dist.barrier()
    return AutoModelForCausalLM.from_pretrained(folder / "model")


def fine_tune(folder, config=None, **options):
    from trl import SFTConfig, SFTTrainer

    peft = options.pop("peft_config", None)
    made = arguments(folder, SFTConfig, deepspeed=config, max_length=16, bf16=False, **options)
    trainer = SFTTrainer(
        model=tiny.llama(), args=made, train_dataset=texts(), processing_class=tiny.tokenizer(), peft_config=peft
    )
    trainer.train()
    return trainer


def prefer(folder, config=None, *, reference=False, **options):
    from trl import DPOConfig, DPOTrainer

    peft = options.pop("peft_config", None)
    made = arguments(folder, DPOConfig, deepspeed=config, max_length=16, bf16=False, **options)
    trainer = DPOTrainer(
        model=model(folder),
        ref_model=tiny.llama(seed=1) if reference else None,
        args=made,
        train_dataset=preferences(folder),
        processing_class=tiny.tokenizer(),
        peft_config=peft,
    )
    trainer.train()
    return trainer


def lora():
    from peft import LoraConfig

    torch.manual_seed(11)
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@pytest.mark.parametrize("stage", [2, 3])
@ranks(2)
def test_sft(tmp_path, stage):
    """Gradient checkpointing without reentry is this trainer's default."""
    plain, trained = fine_tune(tmp_path), fine_tune(tmp_path, auto(stage))
    assert trained.args.gradient_checkpointing
    assert type(trained.model_wrapped).__name__ == "DeepSpeedEngine"
    assert column(trained) == pytest.approx(column(plain), abs=1e-5)
    assert column(trained, "mean_token_accuracy") == pytest.approx(column(plain, "mean_token_accuracy"), abs=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
@ranks(2)
def test_sft_with_lora(tmp_path, stage):
    plain = fine_tune(tmp_path, peft_config=lora(), gradient_accumulation_steps=2)
    trained = fine_tune(tmp_path, auto(stage), peft_config=lora(), gradient_accumulation_steps=2)
    assert column(trained) == pytest.approx(column(plain), abs=1e-5)


@pytest.mark.parametrize("reference", [True, False], ids=["reference given", "reference copied"])
@pytest.mark.parametrize("stage", [2, 3])
@ranks(2)
def test_dpo(tmp_path, stage, reference):
    plain = prefer(tmp_path, reference=reference)
    trained = prefer(tmp_path, auto(stage), reference=reference)
    assert isinstance(trained.ref_model, deepspeed.DeepSpeedEngine)
    assert trained.ref_model.zero_optimization_stage() == (3 if stage == 3 else 0)
    assert column(trained) == pytest.approx(column(plain), abs=1e-5)
    assert column(trained, "rewards/margins") == pytest.approx(column(plain, "rewards/margins"), abs=1e-4)


@ranks(2)
def test_dpo_with_an_optimizer_of_the_config(tmp_path):
    """The reference engine is given the same config without optimizer and schedule, with dotted keys."""
    trained = prefer(tmp_path, auto(3, optimizer=True, scheduler=True), reference=True)
    assert trained.ref_model.optimizer is None or not hasattr(trained.ref_model.optimizer, "param_groups")
    assert column(trained)[0] > 0


@pytest.mark.parametrize("stage", [2, 3])
@ranks(2)
def test_dpo_with_reference_values_computed_first(tmp_path, stage):
    """An engine without optimizer for it, then another one over the same model to train."""
    plain = prefer(tmp_path, precompute_ref_log_probs=True)
    trained = prefer(tmp_path, auto(stage), precompute_ref_log_probs=True)
    assert column(trained) == pytest.approx(column(plain), abs=1e-5)


@ranks(2)
def test_dpo_with_lora_and_a_reference_that_follows(tmp_path):
    plain, trained = prefer(tmp_path, peft_config=lora()), prefer(tmp_path, auto(3), peft_config=lora())
    assert column(trained) == pytest.approx(column(plain), abs=1e-5)
    following = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5, "reference": True}
    plain, trained = prefer(tmp_path, **following), prefer(tmp_path, auto(3), **following)
    assert column(trained) == pytest.approx(column(plain), abs=1e-5)


@ranks(2)
def test_generation_between_steps_leaves_training_as_it_was(tmp_path):
    """The client takes the hooks off, generates with whole parameters, and puts the hooks on again."""
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer
    from trl.models.utils import unwrap_model_for_generation

    prompt, texts_seen = torch.tensor([[1, 5, 6]]), []

    class Generate(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model, torch.no_grad():
                assert all(param.numel() > 0 for param in model.parameters())
                texts_seen.append(model.generate(prompt, max_new_tokens=3, do_sample=False).tolist())

    config = auto(3, stage3_param_persistence_threshold=0)
    made = arguments(tmp_path, SFTConfig, deepspeed=config, max_length=16, bf16=False)
    trainer = SFTTrainer(
        model=tiny.llama(),
        args=made,
        train_dataset=texts(),
        processing_class=tiny.tokenizer(),
        callbacks=[Generate()],
    )
    trainer.train()
    assert len(texts_seen) == 4
    assert all(param.numel() == 0 for param in trainer.model.parameters())
    assert column(trainer) == pytest.approx(column(fine_tune(tmp_path)), abs=1e-5)
