"""Accelerate's own loop: `prepare`, `backward`, `clip_grad_norm_`, states saved and loaded, several models."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import deepspeed
from tests.clients import tiny
from tests.clients.trainers import forget_clients
from tests.harness import ranks
from tests.models import batches, make

STEPS, SAMPLES = 4, 4


class Data(torch.utils.data.Dataset):
    """Rows of a fixed text, in order."""

    def __init__(self, samples):
        self.tokens, self.labels = batches(1, samples)[0]

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return self.tokens[index], self.labels[index]


def accelerator(stage=None, **options):
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    forget_clients()
    steps = options.pop("gradient_accumulation_steps", 1)
    precision = options.pop("mixed_precision", "no")
    plugin = None
    if stage is not None:
        plugin = DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=steps, **options)
    return Accelerator(
        cpu=stage is None,
        deepspeed_plugin=plugin,
        gradient_accumulation_steps=steps,
        mixed_precision=precision,
        kwargs_handlers=[gloo()] if plugin is not None else None,
    )


def gloo():
    """Without a GPU the client takes a run with DeepSpeed for a distributed one only if a backend is named."""
    from accelerate.utils import InitProcessGroupKwargs

    return InitProcessGroupKwargs(backend="gloo")


def train(made, *, clip=None, epochs=1):
    """The loop of the Accelerate documentation; the losses of every micro step, over all ranks, and what it used."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = torch.utils.data.DataLoader(Data(2 * STEPS * SAMPLES), batch_size=SAMPLES)
    model, optimizer, loader, schedule = made.prepare(model, optimizer, loader, schedule)
    losses, norms = [], []
    for _ in range(epochs):
        for tokens, labels in loader:
            with made.accumulate(model):
                loss = model(tokens, labels)
                made.backward(loss)
                if made.sync_gradients and clip is not None:
                    norms.append(float(made.clip_grad_norm_(model.parameters(), clip)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(made.gather(loss.detach().reshape(1)).mean().item())
    return losses, norms, model, optimizer, schedule


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks(2)
def test_losses_are_those_of_a_plain_run(stage, accumulation):
    given = {"gradient_accumulation_steps": accumulation}
    expected, norms, *_ = train(accelerator(**given), clip=0.3)
    found, measured, model, optimizer, schedule = train(accelerator(stage, gradient_clipping=0.3, **given), clip=0.3)
    assert isinstance(model, deepspeed.DeepSpeedEngine)
    assert found == pytest.approx(expected, abs=1e-5)
    # Accelerate has the engine clip in its step, which backward runs already: the norm is that of the step
    assert measured == pytest.approx(norms, abs=1e-5)
    assert max(norms) > 0.3
    assert schedule.get_last_lr() == pytest.approx([group["lr"] for group in model.optimizer.param_groups])
    assert optimizer.step_was_skipped is False


@ranks(2)
def test_bf16():
    found, _, model, *_ = train(accelerator(2, mixed_precision="bf16"))
    expected, *_ = train(accelerator(0, mixed_precision="bf16"))
    assert model.config["bf16"]["enabled"] is True
    assert next(model.parameters()).dtype == torch.bfloat16
    assert found == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("stage", [2, 3])
@ranks(2)
def test_unwrap_and_state_dict(stage):
    made = accelerator(stage, zero3_save_16bit_model=True)
    _, _, model, *_ = train(made)
    assert made.unwrap_model(model) is model.module
    state = made.get_state_dict(model)
    with deepspeed.zero.GatheredParameters(list(model.module.parameters())):
        expected = {name: value.clone() for name, value in model.module.state_dict().items()}
    if stage == 3 and dist.get_rank() != 0:
        assert state is None
        return
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value)
        assert state[name].untyped_storage().nbytes() == value.numel() * value.element_size()


@ranks(2)
def test_a_whole_state_dict_needs_the_flag_at_stage_3():
    made = accelerator(3, zero3_save_16bit_model=False)
    _, _, model, *_ = train(made)
    with pytest.raises(ValueError, match="stage3_gather_16bit_weights_on_model_save"):
        made.get_state_dict(model)


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks(2)
def test_states_are_saved_and_loaded_into_a_live_engine(tmp_path, stage):
    made = accelerator(stage)
    _, _, model, optimizer, schedule = train(made)
    made.save_state(str(tmp_path))
    steps = model.global_steps

    def go_on():
        losses = []
        for tokens, labels in zip(*(part.split(2) for part in batches(1, 8, seed=9)[0]), strict=True):
            loss = model(tokens, labels)
            made.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    first = go_on()
    made.load_state(str(tmp_path))
    assert model.global_steps == steps
    assert go_on() == first


@ranks(2)
def test_dummy_optimizer_and_schedule_take_those_of_the_config():
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler

    forget_clients()
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
            },
        },
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none"}},
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
    }
    made = Accelerator(
        kwargs_handlers=[gloo()], deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config, gradient_clipping=1.0)
    )
    model = make()
    optimizer = DummyOptim(model.parameters(), lr=2e-2, weight_decay=0.1)
    schedule = DummyScheduler(optimizer, total_num_steps=8, warmup_num_steps=2)
    loader = torch.utils.data.DataLoader(Data(2 * STEPS * SAMPLES), batch_size=SAMPLES)
    model, optimizer, loader, schedule = made.prepare(model, optimizer, loader, schedule)
    assert model.train_micro_batch_size_per_gpu() == SAMPLES
    assert type(model.basic_optimizer).__name__ in ("AdamW", "FusedAdam", "DeepSpeedCPUAdam", "Adam")
    assert model.basic_optimizer.param_groups[0]["weight_decay"] == 0.1
    assert type(model.lr_scheduler).__name__ == "WarmupDecayLR"
    for tokens, labels in loader:
        made.backward(model(tokens, labels))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert model.global_steps == STEPS
    assert schedule.get_last_lr() == pytest.approx([1e-2])  # one step before the end, as 8 / 2 ranks are 4 steps
    made.free_memory()
    assert model.optimizer is None


@ranks(2)
def test_several_models_in_one_script():
    """One trained at stage 2, one for inference at stage 3, each with a plugin of its own."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    forget_clients()
    common = {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 4, "gradient_accumulation_steps": 1}
    plugins = {
        "student": DeepSpeedPlugin(hf_ds_config={**common, "zero_optimization": {"stage": 2}}),
        "teacher": DeepSpeedPlugin(hf_ds_config={**common, "zero_optimization": {"stage": 3}}),
    }
    made = Accelerator(kwargs_handlers=[gloo()], deepspeed_plugins=plugins)
    student = make(seed=1)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    student, optimizer = made.prepare(student, optimizer)
    made.state.select_deepspeed_plugin("teacher")
    teacher = made.prepare(make(seed=2)).eval()
    assert (student.zero_optimization_stage(), teacher.zero_optimization_stage()) == (2, 3)
    tokens, labels = batches(1, 2)[0]
    with torch.no_grad():
        expected = make(seed=2)(tokens, labels)
        before = teacher(tokens, labels)
    torch.testing.assert_close(before, expected)
    losses = []
    for _ in range(3):
        loss = student(tokens, labels) + 0.0 * teacher(tokens, labels).detach()
        made.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    with torch.no_grad():
        torch.testing.assert_close(teacher(tokens, labels), expected)


@ranks(2)
def test_a_moe_layer_becomes_a_leaf():
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    forget_clients()
    plugin = DeepSpeedPlugin(zero_stage=3, transformer_moe_cls_names="LlamaMLP")
    made = Accelerator(kwargs_handlers=[gloo()], deepspeed_plugin=plugin)
    model = tiny.llama()
    loader = torch.utils.data.DataLoader(Data(8), batch_size=2)
    engine, *_ = made.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    leaves = [module for module in engine.module.modules() if deepspeed.utils.z3_leaf_module(module)]
    assert {type(leaf).__name__ for leaf in leaves} == {"LlamaMLP"}
