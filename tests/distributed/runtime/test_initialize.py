"""`deepspeed.initialize`: every way to call it, one clear error for each wrong one, nothing left behind."""

from __future__ import annotations

import argparse
import base64
import copy
import gc
import json
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import deepspeed
from deepspeed._assemble.observers import _facts
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.parallel import ParallelLayout
from deepspeed.parallel.mpu import LayoutMpu, current_layout
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from tests.harness import shared_ranks

CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


def steps(engine, count=2):
    for _ in range(count):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()


@shared_ranks(1)
def test_every_source_of_the_config(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    text = base64.urlsafe_b64encode(json.dumps(CONFIG).encode()).decode()
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    for options in (
        {"config": CONFIG},
        {"config": str(path)},
        {"config": text},
        {"config_params": CONFIG},
        {"args": args},
    ):
        engine, optimizer, loader, scheduler = deepspeed.initialize(model=model(), **options)
        assert engine.optimizer_name() == "adamw"
        assert loader is None
        assert scheduler is None
        assert optimizer is engine.optimizer
        steps(engine)
    assert engine.config == CONFIG
    with pytest.raises(AssertionError, match="given twice"):
        deepspeed.initialize(args=args, model=model(), config=CONFIG)
    with pytest.raises(UsageError, match="needs a config"):
        deepspeed.initialize(model=model())
    with pytest.raises(UsageError, match="needs a model"):
        deepspeed.initialize(config=CONFIG)
    with pytest.raises(UsageError, match=r"args\.local_rank is 3"):
        deepspeed.initialize(args=argparse.Namespace(local_rank=3), model=model(), config=CONFIG)


@shared_ranks(1)
def test_every_kind_of_optimizer_and_schedule():
    plain = {"train_batch_size": 2}

    def adam(parameters):
        return torch.optim.Adam(parameters, lr=0.3)

    net = model()
    ready = adam(net.parameters())
    torch_schedule = torch.optim.lr_scheduler.StepLR(ready, 1)
    engine, optimizer, _, schedule = deepspeed.initialize(
        model=net, optimizer=ready, lr_scheduler=torch_schedule, config=plain
    )
    assert optimizer is ready
    assert schedule is torch_schedule
    steps(engine, 1)
    assert engine.get_lr() == [pytest.approx(0.03)]

    net = model()
    engine, optimizer, _, schedule = deepspeed.initialize(
        model=net,
        optimizer=adam,
        lr_scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5),
        config=plain,
    )
    assert isinstance(optimizer, torch.optim.Adam)
    steps(engine, 1)
    assert engine.get_lr() == [0.15]

    net = model()
    groups = [{"params": net[0].parameters(), "lr": 0.5}, {"params": net[2].parameters()}]
    engine, *_ = deepspeed.initialize(model=net, model_parameters=groups, config=CONFIG)
    assert engine.get_lr() == [0.5, 0.1]
    engine, *_ = deepspeed.initialize(model=model(), model_parameters=iter(list(model().parameters())), config=CONFIG)

    scheduled = {**CONFIG, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_max_lr": 1.0}}}
    engine, _, _, schedule = deepspeed.initialize(model=model(), config=scheduled)
    assert type(schedule).__name__ == "WarmupLR"
    with pytest.raises(UsageError, match="a ready StepLR was given without the optimizer"):
        deepspeed.initialize(model=net, lr_scheduler=torch_schedule, config=CONFIG)
    with pytest.raises(UsageError, match="returned int"):
        deepspeed.initialize(model=model(), optimizer=lambda parameters: 3, config=plain)
    with pytest.raises(UsageError, match="no optimizer to call it with"):
        deepspeed.initialize(model=model(), lr_scheduler=lambda opt: None, config=plain)


@shared_ranks(1)
def test_without_an_optimizer_it_evaluates_and_says_what_is_missing():
    engine, optimizer, *_ = deepspeed.initialize(model=model(), config={"train_batch_size": 2})
    assert optimizer is None
    assert engine.eval() is engine
    with torch.no_grad():
        assert engine(torch.ones(2, 4)).shape == (2, 1)
    engine.train()
    engine.backward(engine(torch.ones(2, 4)).sum())
    with pytest.raises(DeepSpeedConfigError, match="needs an optimizer") as caught:
        engine.step()
    assert caught.value.path == "optimizer"
    engine, optimizer, *_ = deepspeed.initialize(model=model(), model_parameters=[], config=CONFIG)
    assert optimizer is None


@shared_ranks(2)
def test_training_data_is_shared_out():
    data = TensorDataset(torch.arange(12).float().unsqueeze(1).expand(12, 4).contiguous())
    engine, _, loader, _ = deepspeed.initialize(model=model(), training_data=data, config=CONFIG)
    seen = torch.cat([batch[0][:, 0] for batch in loader])
    both = [torch.empty_like(seen) for _ in range(2)]
    dist.all_gather(both, seen)
    assert sorted(torch.cat(both).tolist()) == list(range(12))
    evaluation = engine.deepspeed_io(data, route="eval")
    assert next(iter(evaluation))[0].shape == (2, 4)


@shared_ranks(2)
def test_a_failed_construction_leaves_nothing_behind():
    net = model()
    bad = {**CONFIG, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": -1}}}
    layout = ParallelLayout.build(tp=2)
    with pytest.raises(DeepSpeedConfigError, match="warmup_num_steps"):
        deepspeed.initialize(model=net, config=bad, mpu=LayoutMpu(layout))
    for param in net.parameters():
        assert not param._post_accumulate_grad_hooks
        assert not param._backward_hooks
    assert current_layout.get().sizes["tp"] == 1
    layout.close()
    engine, *_ = deepspeed.initialize(model=net, config=CONFIG)
    steps(engine)


@shared_ranks(2)
def test_destroy_frees_everything():
    net = model()
    engine, optimizer, *_ = deepspeed.initialize(model=net, config={**CONFIG, "bf16": {"enabled": True}})
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4, dtype=torch.bfloat16)).sum())
        engine.step()
    masters = [weakref.ref(master) for group in optimizer.param_groups for master in group["params"]]
    engine.destroy()
    engine.destroy()
    del optimizer, engine
    gc.collect()
    assert [ref for ref in masters if ref() is not None] == []
    for param in net.parameters():
        assert not param._post_accumulate_grad_hooks
        assert param.grad is None


@shared_ranks(1)
def test_batch_sizes_can_change():
    engine, *_ = deepspeed.initialize(model=model(), config={**CONFIG, "gradient_accumulation_steps": 2})
    assert engine.get_batch_info() == (4, 2, 2)
    engine.set_train_batch_size(8)
    assert engine.get_batch_info() == (8, 2, 4)
    engine.set_train_micro_batch_size(3)
    assert engine.get_batch_info() == (12, 3, 4)
    with pytest.raises(ValueError, match="not divisible"):
        engine.set_train_batch_size(13)
    applied = []
    for _ in range(4):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        applied.append(engine.was_step_applied())
    assert applied == [False, False, False, True]
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (1, 4, 12)


@shared_ranks(1)
def test_a_step_after_a_changed_batch_size_is_that_of_its_whole_batch():
    batches = list(torch.randn(7, 2, 4, generator=torch.Generator().manual_seed(0)))
    net = model()
    plain = copy.deepcopy(net)
    config = {
        **CONFIG,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    engine = deepspeed.initialize(model=net, config=config)[0]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for part in (batches[:4], batches[4:]):
        engine.set_train_batch_size(2 * len(part))
        for batch in part:
            engine.backward(engine(batch).square().mean())
            engine.step()
        optimizer.zero_grad()
        sum(plain(batch).square().mean() / len(part) for batch in part).backward()
        optimizer.step()
    assert engine.global_steps == 2
    for mine, wanted in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted)


@shared_ranks(1)
def test_what_watches_knows_of_changed_batch_sizes():
    engine, *_ = deepspeed.initialize(model=model(), config={**CONFIG, "steps_per_print": 100})
    engine.set_train_micro_batch_size(6)
    for _ in range(3):
        engine.backward(engine(torch.ones(6, 4)).sum())
        engine.step()
    interval, samples = engine.tput_timer._last
    assert samples == engine.train_batch_size() == 6
    assert engine.tput_timer.current_samples_per_second == pytest.approx(6000 / interval.get_elapsed_msec())
    facts = _facts(engine._parts)
    assert (facts.batch, facts.samples) == (6, 6)
    engine.destroy()


@shared_ranks(1)
def test_the_boundary_can_be_set_by_hand():
    engine, *_ = deepspeed.initialize(model=model(), config={**CONFIG, "gradient_accumulation_steps": 8})
    for boundary in (False, False, True):
        engine.set_gradient_accumulation_boundary(boundary)
        engine.backward(engine(torch.ones(2, 4)).sum(), scale_wrt_gas=False)
    engine.step()
    assert engine.was_step_applied()
    assert engine.global_steps == 1


@shared_ranks(1)
def test_overflow_skips_the_step_and_the_schedule():
    config = {
        **CONFIG,
        "fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    }
    net = model()
    engine, optimizer, _, schedule = deepspeed.initialize(model=net, config=config)
    assert isinstance(optimizer, DeepSpeedOptimizer)
    assert optimizer.cur_scale == engine.loss_scale() == 16
    before = [p.detach().clone() for p in net.parameters()]
    position = schedule.last_batch_iteration
    engine.backward(engine(torch.full((2, 4), torch.inf, dtype=torch.float16)).sum())
    engine.step()
    assert optimizer.overflow
    assert not engine.was_step_applied()
    assert (engine.skipped_steps, engine.global_steps, engine.loss_scale()) == (1, 1, 8)
    assert schedule.last_batch_iteration == position
    for now, then in zip(net.parameters(), before, strict=True):
        assert torch.equal(now, then)
    engine.backward(engine(torch.ones(2, 4, dtype=torch.float16)).sum())
    engine.step()
    assert engine.was_step_applied()
    assert not optimizer.overflow


@shared_ranks(1)
def test_the_returned_optimizer_can_step_by_itself():
    net = model()
    config = {**CONFIG, "bf16": {"enabled": True}, "gradient_clipping": 0.5}
    engine, optimizer, *_ = deepspeed.initialize(model=net, config=config)
    before = net[0].weight.detach().clone()
    engine.backward(engine(torch.ones(2, 4, dtype=torch.bfloat16)).sum())
    optimizer.step()
    optimizer.zero_grad()
    assert not torch.equal(net[0].weight, before)
    assert engine.global_steps == 0
    assert optimizer.param_groups[0]["lr"] == 0.1
    optimizer.param_groups[0]["lr"] = 0.0
    frozen = net[0].weight.detach().clone()
    engine.backward(engine(torch.ones(2, 4, dtype=torch.bfloat16)).sum())
    optimizer.step()
    assert torch.equal(net[0].weight, frozen)


@pytest.mark.parametrize("kind", ["AdamW", "Muon", "SGD"])
@shared_ranks(1)
def test_generators_of_parameters(kind):
    """`{"params": layer.parameters()}` can be read once; read by somebody else, nothing was left to train."""
    net = model()
    engine, *_ = deepspeed.initialize(
        model=net,
        model_parameters=({"params": layer.parameters(), "lr": 0.1} for layer in (net,)),
        config={"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": kind}},
    )
    held = [param for group in engine.basic_optimizer.param_groups for param in group["params"]]
    assert {id(param) for param in held} == {id(param) for param in net.parameters()}
    before = net[0].weight.detach().clone()
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    assert not torch.equal(net[0].weight, before)


@shared_ranks(1)
def test_wrong_losses_are_told():
    engine, *_ = deepspeed.initialize(model=model(), config=CONFIG)
    with pytest.raises(deepspeed.DeepSpeedError, match=r"scalar loss, found the shape \(2, 1\)"):
        engine.backward(engine(torch.ones(2, 4)))
    with pytest.raises(deepspeed.DeepSpeedError, match="does not require a gradient"):
        engine.backward(torch.tensor(1.0))
    with pytest.raises(deepspeed.DeepSpeedError, match="found float"):
        engine.backward(1.0)


@shared_ranks(2)
def test_a_mesh_or_an_mpu_sets_the_data_parallel_size():
    engine, *_ = deepspeed.initialize(model=model(), config=CONFIG, mesh_param=(2, 1))
    assert engine.train_batch_size() == 4
    assert engine.sequence_parallel_size == 1
    engine.destroy()
    layout = ParallelLayout.build(tp=2)
    engine, *_ = deepspeed.initialize(model=model(), config=CONFIG, mpu=LayoutMpu(layout))
    assert engine.train_batch_size() == 2
    assert engine.mp_world_size == 2
    steps(engine)
    with pytest.raises(UsageError, match="pass one of them"):
        deepspeed.initialize(model=model(), config=CONFIG, mpu=LayoutMpu(layout), mesh_param=(2, 1))


@shared_ranks(2)
def test_model_parallel_norm_counts_split_parameters_on_all_ranks_and_shared_ones_once():
    net = nn.ModuleDict({"split": nn.Linear(1, 1, bias=False), "shared": nn.Linear(1, 1, bias=False)})
    net["split"].weight.model_parallel = True
    layout = ParallelLayout.build(tp=2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=optimizer, config={"train_micro_batch_size_per_gpu": 1}, mpu=LayoutMpu(layout)
    )
    weight = 3.0 if dist.get_rank() == 0 else 4.0
    engine.backward((net["split"].weight * weight + net["shared"].weight * 12.0).sum())
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(13.0)


@shared_ranks(1)
def test_getters_and_attributes_of_the_module():
    net = model()
    net.custom = "from the module"
    engine, *_ = deepspeed.initialize(model=net, config=CONFIG)
    assert engine.custom == "from the module"
    assert engine.zero_optimization_stage() == 0
    assert engine.gradient_clipping() == 1.0
    assert not engine.fp16_enabled()
    assert engine.dynamic_loss_scale() is False
    assert (engine.world_size, engine.global_rank, engine.dp_world_size) == (1, 0, 1)
    assert engine.get_mom() == [(0.9, 0.999)]
    with pytest.raises(AttributeError, match="neither the engine nor Sequential has an attribute 'nothing'"):
        _ = engine.nothing


@shared_ranks(1)
def test_compile_keeps_training_alike():
    results = []
    for compiled in (False, True):
        net = model()
        engine, *_ = deepspeed.initialize(model=net, config=CONFIG)
        if compiled:
            engine.compile(backend="eager")
            engine.compile(backend="eager")
            assert engine.is_compiled
        steps(engine, 3)
        results.append(net[0].weight.detach().clone())
    assert torch.equal(*results)


@shared_ranks(1)
def test_the_activation_checkpointing_section_applies_while_the_engine_lives():
    from deepspeed.runtime.activation_checkpointing.configuration import CONFIGURATION

    config = {**CONFIG, "activation_checkpointing": {"synchronize_checkpoint_boundary": True}}
    engine, *_ = deepspeed.initialize(model=model(), config=config)
    assert CONFIGURATION.plan.settings.synchronize_checkpoint_boundary
    engine.destroy()
    assert not CONFIGURATION.plan.settings.synchronize_checkpoint_boundary


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}])
@shared_ranks(1)
def test_weights_written_between_steps_are_kept(precision):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=optimizer, config={"train_batch_size": 2, "gradient_clipping": 0.0, **precision}
    )
    x = torch.zeros(2, 4, dtype=net[0].weight.dtype)
    engine.backward(engine(x).sum())
    engine.step()
    wanted = {name: torch.full_like(value, 0.5) for name, value in net.state_dict().items()}
    net.load_state_dict(wanted)
    engine.backward(engine(x).sum())
    engine.step()
    assert torch.equal(net[0].weight, wanted["0.weight"])  # its gradient is zero for this input
    assert torch.equal(net[2].bias, wanted["2.bias"] - 2)
