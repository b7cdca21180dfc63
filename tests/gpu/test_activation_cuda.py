"""Activation checkpointing on a real GPU: random states, host memory, buffers; the same numbers as without."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from deepspeed.accelerator.cuda import CUDA_Accelerator
from deepspeed.runtime import rng
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.activation_checkpointing.state import CONFIGURATION

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
    rng.reset()
    yield
    CONFIGURATION.clear()
    rng.reset()


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


@pytest.mark.parametrize("run", VARIANTS.values(), ids=VARIANTS)
def test_inputs_in_host_memory_leave_the_device(run):
    def kept():
        gc.collect()
        gc.disable()  # inputs go at once, not when the collector comes along
        out = torch.randn(64 * MIB // 4, device="cuda", requires_grad=True) * 1
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(LAYERS):
            out = run(lambda x: x.sin().cos(), out)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before
        gc.enable()
        out.sum().backward()
        return held // MIB

    assert kept() == LAYERS * 64  # each output is the next one's input
    checkpointing.configure(None, checkpoint_in_cpu=True)
    assert kept() == 0  # the first input went, the last output came


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
