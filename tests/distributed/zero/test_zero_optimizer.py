"""The optimizer that the engine returns at ZeRO's stages, as clients use it."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer, ZeroOptimizer
from deepspeed.utils import safe_get_full_fp32_param
from tests.closeness import Training, assert_same_training
from tests.harness import shared_ranks
from tests.models import PlainLoop, Tiny, batches, make, share
from tests.user_models import whole

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SAMPLES = 12


class Flipped(torch.optim.SGD):
    """A schedule-free optimizer in small: eval() exchanges each weight for another, train() brings it back."""

    mode = "train"

    @torch.no_grad()
    def _exchange(self, factor):
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(factor)

    def eval(self):
        if self.mode == "train":
            self.mode = "eval"
            self._exchange(0.5)

    def train(self):
        if self.mode == "eval":
            self.mode = "train"
            self._exchange(2.0)


def build(stage, precision="fp32", model=None, *, optimizer=None, persistent=0, **config):
    section = {} if precision == "fp32" else {precision: {"enabled": True}}
    if precision == "fp16":
        section["fp16"]["loss_scale"] = 128.0
    made = {"optimizer": optimizer} if optimizer else {}
    if not optimizer:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}}
    engine, returned, *_ = deepspeed.initialize(
        model=make() if model is None else model,
        config={
            "train_micro_batch_size_per_gpu": SAMPLES // dist.get_world_size(),
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": persistent},
            "zero_allow_untested_optimizer": True,
            **section,
            **config,
        },
        **made,
    )
    assert engine.optimizer is returned
    return engine


def mine(batch):
    return share(batch, dist.get_rank(), dist.get_world_size())


def train(engine, data):
    losses = []
    for batch in data:
        loss = engine(*mine(batch))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def parameters(model):
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("precision", list(DTYPES))
@shared_ranks(1, 2)
def test_step_is_called_on_the_optimizer(precision):
    """Lightning's Fabric never calls engine.step()."""
    world, data = dist.get_world_size(), batches(3, SAMPLES)
    for stage in (1, 2, 3):
        engine = build(stage, precision, gradient_clipping=0.3)
        optimizer = engine.optimizer
        assert type(optimizer) is ZeroOptimizer
        assert isinstance(optimizer, DeepSpeedOptimizer)
        loop = PlainLoop(
            make(),
            lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
            ranks=world,
            clip=0.3,
            param=DTYPES[precision],
            scale=128.0 if precision == "fp16" else 1.0,
        )
        before = parameters(loop.model)
        for batch in data:
            engine.backward(engine(*mine(batch)))
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.overflow is False
            loop.step([batch])
        assert_same_training(Training(before, whole(engine)), Training(before, parameters(loop.model)))
        assert engine.global_steps == 0
        engine.destroy()


@shared_ranks(1)
def test_its_class_can_be_based_upon():
    """Fabric makes a class of its own and the optimizer's and copies the attributes."""
    engine = build(2)
    inner = engine.optimizer

    class Wrapper:
        def __init__(self, optimizer):
            self.__class__ = type("Wrapped", (self.__class__, optimizer.__class__), {})
            self.__dict__ = dict(vars(optimizer))
            self._optimizer = optimizer

        @property
        def optimizer(self):
            return self._optimizer

        @optimizer.setter
        def optimizer(self, value):
            self._optimizer = value

    wrapped = Wrapper(inner)
    assert isinstance(wrapped, ZeroOptimizer)
    assert wrapped.param_groups is inner.param_groups
    assert wrapped.defaults["lr"] == 1e-2
    assert not hasattr(wrapped, "train")


class Grows(Tiny):
    """Tiny, and a layer that is added while it is trained."""

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.late = self.new() if late else None

    @staticmethod
    def new():
        generator = torch.Generator().manual_seed(3)
        layer = nn.Linear(8, 8)
        with torch.no_grad():
            for param in layer.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
        return layer

    def forward(self, tokens, labels):
        if self.late is None:
            return super().forward(tokens, labels)
        hidden = self.late(self.embedding(tokens))
        logits = self.head(hidden + self.down(torch.relu(self.norm(self.up(hidden)))))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("persistent", [0, 100_000])
@pytest.mark.parametrize("precision", list(DTYPES))
@shared_ranks(1, 3)
def test_a_group_is_added(precision, persistent):
    world, data = dist.get_world_size(), batches(4, SAMPLES)
    for stage in (1, 2, 3) if persistent == 0 else (3,):  # the threshold is one of stage 3 alone
        model = make(Grows)
        engine = build(stage, precision, model, persistent=persistent, gradient_clipping=0.0)
        train(engine, data[:2])
        layer = Grows.new().to(DTYPES[precision])
        if dist.get_rank():
            with torch.no_grad():
                layer.weight.add_(1)  # rank 0's values count
        model.late = layer
        before = engine.optimizer.param_groups
        engine.optimizer.add_param_group({"params": layer.parameters(), "lr": 0.05, "weight_decay": 0.0})
        assert engine.optimizer.param_groups is before
        assert [group["lr"] for group in before] == [1e-2, 0.05]
        with pytest.raises(ValueError, match="late.weight.*already" if world > 1 else "already"):
            engine.optimizer.add_param_group({"params": [layer.weight]})
        train(engine, data[2:])

        # the same in plain PyTorch
        scale = 128.0 if precision == "fp16" else 1.0
        loop = PlainLoop(
            make(Grows),
            lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
            ranks=world,
            param=DTYPES[precision],
            scale=scale,
        )
        for batch in data[:2]:
            loop.step([batch])
        halfway = parameters(loop.model)
        loop.model.late = Grows.new().to(DTYPES[precision])
        loop.masters.late = Grows.new().to(DTYPES[precision]).float()
        loop.optimizer.add_param_group({"params": loop.masters.late.parameters(), "lr": 0.05, "weight_decay": 0.0})
        halfway |= {f"late.{name}": value for name, value in parameters(loop.model.late).items()}
        for batch in data[2:]:
            loop.step([batch])
        assert_same_training(Training(halfway, whole(engine)), Training(halfway, parameters(loop.model)))
        assert not torch.equal(
            safe_get_full_fp32_param(layer.weight), Grows.new().weight.detach().to(DTYPES[precision]).float()
        )
        engine.destroy()


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@shared_ranks(1, 3)
def test_modes_of_a_schedule_free_optimizer(precision, direct):
    batch = batches(1, SAMPLES)[0]
    for stage in (0, 1, 2, 3):
        model = make()
        inner = Flipped(model.parameters(), lr=0.1)
        engine = build(stage, precision, model, optimizer=inner)
        for _ in range(2):
            train(engine, [batch])
        trained = whole(engine)
        caller = engine.optimizer.optimizer if direct and hasattr(engine.optimizer, "optimizer") else engine.optimizer
        caller.eval()
        for name, param in whole(engine).items():
            assert torch.equal(param, trained[name] * 0.5), (stage, name)
        caller.train()
        for name, param in whole(engine).items():
            assert torch.equal(param, trained[name]), (stage, name)
        engine.destroy()
        assert "eval" not in vars(inner)


@shared_ranks(1)
def test_other_optimizers_have_no_modes():
    engine = build(1)
    assert not hasattr(engine.optimizer, "train")
    assert not hasattr(engine.optimizer, "eval")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@shared_ranks(1, 3)
def test_state_dict(precision):
    data = batches(4, SAMPLES)
    for stage in (1, 2, 3) if precision == "fp32" else (0, 1, 2, 3):  # else it is torch's own
        engine = build(stage, precision)
        train(engine, data[:2])
        saved = copy.deepcopy(engine.optimizer.state_dict())  # torch gives references
        weights = engine.module_state_dict()
        weights = {name: value.clone() for name, value in weights.items()}
        losses = train(engine, data[2:])
        after = whole(engine)
        other = build(stage, precision)
        other.load_module_state_dict(weights)
        groups = other.optimizer.param_groups
        options = groups[0]
        other.optimizer.load_state_dict(saved)
        assert other.optimizer.param_groups is groups
        assert groups[0] is options
        assert train(other, data[2:]) == losses
        for name, value in whole(other).items():
            assert torch.equal(value, after[name]), name
        if stage:
            with pytest.raises(ValueError, match=r"rank 5 of 7"):
                other.optimizer.load_state_dict({**saved, "rank": 5, "ranks": 7})
        engine.destroy()
        other.destroy()


def remove_hooks(optimizer):
    """As trl does it."""
    offload = optimizer.parameter_offload
    for _, param in [*offload.module.named_parameters(recurse=True), *offload.module.ds_external_parameters()]:
        param.ds_active_sub_modules.clear()
    for hook in offload.forward_hooks:
        hook.remove()
    for hook in offload.backward_hooks:
        hook.remove()
    offload.forward_hooks = []
    offload.backward_hooks = []


@shared_ranks(1, 2)
def test_hooks_taken_off_and_put_on_again():
    data = batches(6, SAMPLES)
    straight = build(3)
    expected = train(straight, data)
    engine = build(3)
    found = []
    for batch in data:
        with deepspeed.zero.GatheredParameters(engine.module.parameters()):
            remove_hooks(engine.optimizer)
            assert not engine.module.up._forward_pre_hooks
            with torch.no_grad():
                engine.module(*mine(batch))
            coordinator = engine.optimizer.parameter_offload.param_coordinator
            if not coordinator.is_invalid_trace():
                coordinator._invalidate_trace()
            engine.optimizer.parameter_offload._register_deepspeed_module(engine.optimizer.parameter_offload.module)
        found += train(engine, [batch])
    assert found == expected
    wanted = whole(straight)
    for name, value in whole(engine).items():
        assert torch.equal(value, wanted[name]), name
    engine.destroy()
    assert not hasattr(engine.module, "ds_external_parameters")


@shared_ranks(1, 2)
def test_only_stage_3_has_hooks():
    for stage in (1, 2):
        assert not hasattr(build(stage).optimizer, "parameter_offload")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@shared_ranks(1, 3)
def test_legacy_views(precision):
    world, rank = dist.get_world_size(), dist.get_rank()
    for stage in (1, 2, 3):
        engine = build(stage, precision, gradient_accumulation_steps=1)
        optimizer, params = engine.optimizer, list(engine.module.parameters())
        masters = torch.cat([safe_get_full_fp32_param(param).view(-1) for param in params])
        flat = optimizer.single_partition_of_fp32_groups[0]
        assert flat.dtype == torch.float32
        if stage < 3 or world == 1:
            each = flat.numel()
            expected = torch.zeros(each * world)
            expected[: masters.numel()] = masters
            assert torch.equal(flat, expected[rank * each : (rank + 1) * each])
            assert torch.equal(
                torch.cat(optimizer.parallel_partitioned_bit16_groups[0]), expected.to(DTYPES[precision])
            )
            assert optimizer.groups_padding == [each - len(masters[rank * each : (rank + 1) * each])]
        else:
            chunks = [param.ds_tensor for param in params]
            assert all(a is b for a, b in zip(optimizer.fp16_partitioned_groups[0], chunks, strict=True))
            assert torch.equal(optimizer.fp16_partitioned_groups_flat[0], torch.cat(chunks))
            assert torch.equal(optimizer.fp32_partitioned_groups_flat[0], torch.cat(chunks).float())
            with pytest.raises(AttributeError, match="do not stay whole"):
                _ = optimizer.bit16_groups_flat
        assert all(one is other for one, other in zip(optimizer.bit16_groups[0], params, strict=True))
        assert optimizer.partition_count == [world]
        assert optimizer.sub_group_to_group_id == {0: 0}
        assert optimizer.averaged_gradients == {}
        engine.backward(engine(*mine(batches(1, SAMPLES)[0])))
        assert sum(grad.numel() for grad in optimizer.averaged_gradients[0]) > 0
        engine.step()
        assert optimizer.averaged_gradients == {}
        with pytest.raises(AttributeError, match="no_such_thing"):
            _ = optimizer.no_such_thing
        engine.destroy()


@shared_ranks(1, 2)
def test_nothing_stays_after_destroy():
    for stage in (1, 3):
        engine = build(stage)
        train(engine, batches(1, SAMPLES))
        gone = weakref.ref(engine.optimizer)
        engine.destroy()
        gc.collect()
        assert gone() is None
