"""Activation checkpointing on a real GPU: random states, host memory, buffers; the same numbers as without."""

from __future__ import annotations

import gc
import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from deepspeed.accelerator.cuda import CUDA_Accelerator
from deepspeed.runtime import rng
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.activation_checkpointing.configuration import CONFIGURATION
from deepspeed.runtime.activation_checkpointing.offload_activations import CheckpointHiddenStatesOffload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=str(CUDA_Accelerator.why_unavailable())),
]

VARIANTS = {"reentrant": checkpointing.checkpoint, "non_reentrant": checkpointing.non_reentrant_checkpoint}
MIB = 2**20
LAYERS = 8


@pytest.fixture(autouse=True)
def fresh():
    CONFIGURATION.clear()
    rng.get_cuda_rng_tracker().reset()
    yield
    CONFIGURATION.clear()
    rng.get_cuda_rng_tracker().reset()


def plainly(function, *args):
    return function(*args)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        with checkpointing.get_cuda_rng_tracker().fork():
            inner = F.dropout(self.inner(x).relu(), 0.3)
        return x + F.dropout(self.outer(inner), 0.3)


def trained(run, dtype, autocast):
    torch.manual_seed(0)
    checkpointing.model_parallel_cuda_manual_seed(1)
    blocks = [Block(512).to("cuda", dtype) for _ in range(LAYERS)]
    seen = []
    for _ in range(3):
        x = torch.randn(2048, 512, device="cuda", dtype=dtype, requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            out = x * 1
            for block in blocks:
                out = run(block, out)
        out.float().square().mean().backward()
        seen += [out.detach(), x.grad]
    with checkpointing.get_cuda_rng_tracker().fork():
        seen.append(torch.rand(3, device="cuda"))
    return [*seen, torch.rand(3, device="cuda"), *(p.grad for block in blocks for p in block.parameters())]


@pytest.mark.parametrize(("cpu", "contiguous"), list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
)
@pytest.mark.parametrize("run", VARIANTS.values(), ids=VARIANTS)
def test_bit_equal_to_the_plain_model(run, dtype, autocast, cpu, contiguous):
    wanted = trained(plainly, dtype, autocast)
    checkpointing.configure(
        None,
        partition_activations=contiguous,
        contiguous_checkpointing=contiguous,
        num_checkpoints=LAYERS,
        checkpoint_in_cpu=cpu,
        synchronize=True,
    )
    found = trained(run, dtype, autocast)
    assert all(torch.equal(left, right) for left, right in zip(wanted, found, strict=True))


def held_by(run, around=nullcontext()):
    """(MiB that forward leaves on the device, peak of both passes) of layers whose outputs have 64 MiB."""
    gc.collect()
    gc.disable()  # inputs go at once, not when the collector comes along
    torch.manual_seed(0)
    first = torch.randn(64 * MIB // 4, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with around:
        out = first * 1
        for _ in range(LAYERS):
            out = run(lambda x: x.sin().cos(), out)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    gc.enable()
    out.sum().backward()
    torch.cuda.synchronize()
    return held // MIB, (torch.cuda.max_memory_allocated() - before) // MIB, first.grad


# Of inputs in host memory, the newest stays, two may be on their way out, and beside them is the last output.
STAY = 64 * (1 + 2 + 1)


@pytest.mark.parametrize("run", VARIANTS.values(), ids=VARIANTS)
def test_inputs_in_host_memory_leave_the_device(run):
    held, peak, wanted = held_by(run)
    assert held == (LAYERS + 1) * 64  # each output is the next one's input
    checkpointing.configure(None, checkpoint_in_cpu=True)
    for _ in range(3):
        held, less, found = held_by(run)
        assert held <= STAY
        assert less <= peak - (LAYERS - 5) * 64
        assert torch.equal(wanted, found)
    gc.collect()
    pool = CONFIGURATION.plan.keeper._offload.pool
    assert (pool.in_use, pool.unused) == (0, LAYERS - 1)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_marked_tensors_leave_the_device(reentrant, pinned, streams):
    def run(function, x):
        return torch_checkpoint(function, x, use_reentrant=reentrant)

    def marked(function, x):
        offload.mark(x)
        return run(function, x)

    offload = CheckpointHiddenStatesOffload(pinned, streams, max_cpu_buffer_pool_count=3)
    _, peak, wanted = held_by(run)
    for _ in range(3):
        held, less, found = held_by(marked, offload)
        assert held <= (STAY if streams else STAY - 128)
        assert less < peak
        assert torch.equal(wanted, found)
        assert offload.stats.offloaded_tensors == offload.stats.restored_tensors == LAYERS - 1
        assert offload.stats.offloaded_bytes == (LAYERS - 1) * 64 * MIB
        gc.collect()
        assert offload._states.offload.pool.unused == 3
    offload.reset()
    assert offload._states.offload.pool.unused == 0


def test_copies_are_queued_beside_what_computes():
    """A copy does not wait for work that is queued after it."""
    offload = CheckpointHiddenStatesOffload(keep_last_count=0)
    weight = torch.randn(8192, 8192, device="cuda")
    x = torch.randn(8192, 8192, device="cuda", requires_grad=True)
    with offload:
        middle = x * 1
        offload.mark(middle)
        out = middle.sin()
        copied = offload._states.offload._leaving[0]().ticket
        for _ in range(40):  # hundreds of milliseconds
            weight = weight @ weight
            weight /= weight.norm()
        busy = torch.cuda.Event()
        busy.record()
        copied._event.synchronize()
        assert not busy.query()  # the values are on the host while the device still computes
        offload.mark(out)
        last = out.cos()
    last.sum().backward()
    assert torch.allclose(x.grad, -x.sin().sin() * x.cos(), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.t(), lambda x: x[:, 8:200]])
def test_views_and_dtypes_come_back(view, dtype):
    offload = CheckpointHiddenStatesOffload(keep_last_count=0, max_fwd_stash_count=0)
    x = torch.randn(256, 256, device="cuda", dtype=dtype, requires_grad=True)
    (wanted,) = torch.autograd.grad(view(x * 1).square().abs().sum(), x)
    with offload:
        middle = view(x * 1)
        offload.mark(middle)
        out = middle.square().abs().sum()
    (found,) = torch.autograd.grad(out, x)
    assert offload.stats.restored_tensors == 1
    assert torch.equal(wanted, found)


def test_a_step_that_is_given_up_leaves_nothing():
    offload = CheckpointHiddenStatesOffload(keep_last_count=1)
    x = torch.randn(4096, 4096, device="cuda", requires_grad=True)
    gc.collect()
    before = torch.cuda.memory_allocated()
    with offload:
        out = x * 1
        for _ in range(4):
            offload.mark(out)
            out = torch_checkpoint(torch.sin, out, use_reentrant=False)
    del out
    gc.collect()
    offload.reset()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert (offload._states.offload.pool.in_use, offload._states.offload.pool.unused) == (0, 0)


def test_profile_times_the_device(capsys):
    checkpointing.configure(None, profile=True)
    x = torch.randn(4096, 4096, device="cuda", requires_grad=True)
    checkpointing.checkpoint(lambda a: (a @ a @ a @ a).sum(), x).backward()
    lines = [line for line in capsys.readouterr().out.splitlines() if "checkpoint " in line]
    times = [float(line.rsplit(": ", 1)[1]) for line in lines]
    assert len(times) == 2
    assert min(times) > 0.05


def test_the_tracker_keeps_states_of_the_device():
    torch.manual_seed(9)
    checkpointing.model_parallel_cuda_manual_seed(50)
    with checkpointing.get_cuda_rng_tracker().fork():
        own = torch.rand(8, device="cuda")
    shared = torch.rand(8, device="cuda")
    assert torch.equal(own, torch.rand(8, device="cuda", generator=torch.Generator("cuda").manual_seed(50 + 2718)))
    assert torch.equal(shared, torch.rand(8, device="cuda", generator=torch.Generator("cuda").manual_seed(50)))
    assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(9)))  # the CPU's stays
