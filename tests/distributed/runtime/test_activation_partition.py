"""Saved inputs sharded over a tensor-parallel group: the same numbers, and really only a shard in memory.

torch's checkpoint imports torch._dynamo at its first call, which takes seconds in a fresh rank: each test therefore
goes through many cases.
"""

from __future__ import annotations

import gc
import itertools
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from deepspeed.config.memory import ActivationCheckpointingConfig
from deepspeed.parallel import LayoutMpu, ParallelLayout
from deepspeed.runtime.activation_checkpointing import checkpointing, configuration
from deepspeed.runtime.activation_checkpointing.configuration import CONFIGURATION, _KeptInput
from tests.harness import ranks, shared_ranks

VARIANTS = {"reentrant": checkpointing.checkpoint, "non_reentrant": checkpointing.non_reentrant_checkpoint}
LAYERS = 3


class CopyToSlices(torch.autograd.Function):
    """Identity whose gradient is summed over the tensor-parallel group."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumOfSlices(torch.autograd.Function):
    """Sum over the tensor-parallel group, whose gradient is the identity."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class SlicedBlock(nn.Module):
    """Half of a feed-forward layer on each rank, with dropout of the slice and of the whole."""

    def __init__(self, width, group):
        super().__init__()
        with checkpointing.get_cuda_rng_tracker().fork():
            self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.group = group

    def forward(self, x, mask):
        inner = self.inner(CopyToSlices.apply(x, self.group)).relu()
        with checkpointing.get_cuda_rng_tracker().fork():
            inner = F.dropout(inner, 0.4)
        outer = SumOfSlices.apply(self.outer(inner), self.group)
        return x + F.dropout(outer, 0.2) * mask


def plainly(function, *args):
    return function(*args)


def trained(run, mpu, *, shape=(31, 67), dtype=torch.float32, steps=2):
    """Outputs, gradients and the draws that follow, of a few steps."""
    seed = 5 + mpu.get_data_parallel_rank()
    checkpointing.model_parallel_cuda_manual_seed(seed)
    blocks = [SlicedBlock(shape[-1], mpu.get_tensor_model_parallel_group()).to(dtype) for _ in range(LAYERS)]
    seen = []
    for _ in range(steps):
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        mask = torch.rand(shape, dtype=dtype)
        out = x * 1
        for block in blocks:
            out = run(block, out, mask)
        out.float().square().mean().backward()
        seen += [out.detach(), x.grad]
    with checkpointing.get_cuda_rng_tracker().fork():
        seen.append(torch.rand(3))
    return [*seen, torch.rand(3), *(p.grad for block in blocks for p in block.parameters())]


def equal(wanted, found, case):
    differ = [place for place, pair in enumerate(zip(wanted, found, strict=True)) if not torch.equal(*pair)]
    assert not differ, case


COMBINATIONS = [
    (partition, cpu, contiguous)
    for partition, cpu, contiguous in itertools.product((False, True), repeat=3)
    if partition or not contiguous
]


@shared_ranks(2)
def test_bit_equal_to_the_plain_model():
    with ParallelLayout.build(tp=2) as layout:
        mpu = LayoutMpu(layout)
        for dtype, (partition, cpu, contiguous) in itertools.product((torch.float32, torch.bfloat16), COMBINATIONS):
            checkpointing.configure(
                mpu,
                partition_activations=partition,
                checkpoint_in_cpu=cpu,
                contiguous_checkpointing=contiguous,
                num_checkpoints=LAYERS,
            )
            wanted = trained(plainly, mpu, dtype=dtype)
            for variant, run in VARIANTS.items():
                equal(wanted, trained(run, mpu, dtype=dtype), (variant, dtype, partition, cpu, contiguous))


@shared_ranks(2)
def test_shards_leave_for_the_host_and_come_back():
    """As on a device, where inputs are not in host memory already."""
    configuration.on_device = lambda tensor: True
    with ParallelLayout.build(tp=2) as layout:
        mpu = LayoutMpu(layout)
        for contiguous in (False, True):
            checkpointing.configure(
                mpu,
                partition_activations=True,
                checkpoint_in_cpu=True,
                contiguous_checkpointing=contiguous,
                num_checkpoints=LAYERS,
            )
            keeper = CONFIGURATION.plan.keeper
            keeper._to_host = True
            wanted = trained(plainly, mpu)
            for variant, run in VARIANTS.items():
                equal(wanted, trained(run, mpu), (variant, contiguous))
            stats = keeper._offload.stats
            steps = len(VARIANTS) * 2
            assert stats.offloaded_tensors == stats.restored_tensors == steps * (2 * LAYERS - 1)
            assert stats.offloaded_bytes == stats.offloaded_tensors * 4 * -(-31 * 67 // 2)  # shards of two ranks


@shared_ranks(4)
def test_two_tensor_parallel_groups_beside_each_other():
    with ParallelLayout.build(tp=2) as layout:
        mpu = LayoutMpu(layout)
        checkpointing.configure(mpu, partition_activations=True)
        wanted = trained(plainly, mpu)
        for variant, run in VARIANTS.items():
            equal(wanted, trained(run, mpu), variant)


@shared_ranks(3)
def test_an_uneven_number_of_ranks_and_a_retained_graph():
    with ParallelLayout.build(tp=3) as layout:
        checkpointing.configure(LayoutMpu(layout), partition_activations=True)
        torch.manual_seed(0)
        x = torch.randn(41, 53).T.requires_grad_()
        (2 * (x.tanh() * x).sum()).backward()
        wanted, x.grad = x.grad, None
        for run in VARIANTS.values():
            out = run(lambda a: a.tanh() * a, x * 1).sum()
            out.backward(retain_graph=True)
            out.backward()
            assert torch.equal(wanted, x.grad)
            x.grad = None


def kept_between_forward_and_backward(run):
    """(storages of the layers' inputs that live, elements that wait in shards) after a forward."""
    gc.collect()
    gc.freeze()  # what is there already is not looked through again
    gc.disable()  # inputs go at once, not when the collector comes along
    inputs = []

    def layer(x):
        inputs.append(weakref.ref(x.untyped_storage()))
        return x.sin().cos()

    x = torch.randn(64, 65, requires_grad=True)
    out = x.clone()
    for _ in range(LAYERS):
        out = run(layer, out)
    loss = out.sum()
    del out
    alive = sum(storage() is not None for storage in inputs)
    waiting = sum(thing.flat.numel() for thing in gc.get_objects() if isinstance(thing, _KeptInput))
    loss.backward()
    del loss
    gc.enable()
    assert not [thing for thing in gc.get_objects() if isinstance(thing, _KeptInput)]
    return alive, waiting


@shared_ranks(2)
def test_only_a_shard_waits_for_backward():
    with ParallelLayout.build(tp=2) as layout:
        for run, contiguous in itertools.product(VARIANTS.values(), (False, True)):
            checkpointing.configure(None)
            assert kept_between_forward_and_backward(run) == (LAYERS, 0)  # without sharding all inputs live
            checkpointing.configure(
                LayoutMpu(layout),
                partition_activations=True,
                contiguous_checkpointing=contiguous,
                num_checkpoints=LAYERS if contiguous else None,
            )
            for _ in range(2):
                assert kept_between_forward_and_backward(run) == (0, LAYERS * 64 * 65 // 2)
            arena = CONFIGURATION.plan.keeper.arena
            assert (arena.buffer_elements if arena else 0) == (LAYERS * 2176 if contiguous else 0)  # 2080, aligned


@ranks(2)
def test_the_section_of_an_engine_with_its_layout():
    with ParallelLayout.build(tp=2) as layout:
        section = ActivationCheckpointingConfig(partition_activations=True)
        applied = checkpointing.configure_from(section, layout)
        assert kept_between_forward_and_backward(checkpointing.checkpoint) == (0, LAYERS * 64 * 65 // 2)
        checkpointing.configure(None, partition_activations=False)  # an argument comes first
        assert kept_between_forward_and_backward(checkpointing.checkpoint) == (LAYERS, 0)
        checkpointing.configure(mpu_=None)  # the group is the engine's
        assert kept_between_forward_and_backward(checkpointing.checkpoint) == (0, LAYERS * 64 * 65 // 2)
        applied()
        assert kept_between_forward_and_backward(checkpointing.checkpoint) == (LAYERS, 0)

        checkpointing.configure(LayoutMpu(layout), partition_activations=True)
        # Small inputs and integers stay as they are.
        small = torch.full((4,), float(dist.get_rank()), requires_grad=True)  # may differ between ranks
        ids = torch.arange(5000) + dist.get_rank()
        checkpointing.checkpoint(lambda a, i: a.exp() * i[:4], small, ids).sum().backward()
        assert torch.equal(small.grad, small.detach().exp() * ids[:4])


@shared_ranks(2)
def test_seeds_by_tensor_rank():
    with ParallelLayout.build(tp=2) as layout:
        checkpointing.configure(LayoutMpu(layout))
        checkpointing.model_parallel_cuda_manual_seed(77)
        with checkpointing.get_cuda_rng_tracker().fork():
            own = torch.rand(4)
        shared = torch.rand(4)
        assert torch.equal(shared, torch.rand(4, generator=torch.Generator().manual_seed(77)))
        wanted = torch.rand(4, generator=torch.Generator().manual_seed(77 + 2718 + dist.get_rank()))
        assert torch.equal(own, wanted)
