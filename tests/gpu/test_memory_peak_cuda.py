"""The memory profiler by the allocator of a device."""

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.profiling.memory_profiler import MemoryProfiler
from tests.harness import ranks

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def model():
    return nn.Sequential(nn.Linear(256, 256), nn.Sequential(nn.Linear(256, 65536), nn.ReLU()), nn.Linear(65536, 16))


@needs_cuda
def test_the_total_is_the_allocators():
    net, x = model().cuda(), torch.ones(512, 256, device="cuda")
    net(x).sum().backward()  # workspaces of libraries
    with MemoryProfiler(net) as profiler:
        net(x).sum().backward()
    peak = profiler.peak
    assert peak.total == torch.cuda.max_memory_allocated()
    assert (peak.phase, peak.device.type) == ("backward", "cuda")
    assert peak.module.startswith("1")
    assert peak.kinds["parameters"] == sum(param.numel() for param in net.parameters()) * 4
    assert sum(peak.kinds.values()) == pytest.approx(peak.total, rel=0.05)


@needs_cuda
@ranks(1)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_of_an_engine(stage):
    config = {
        "train_micro_batch_size_per_gpu": 512,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "memory_profiler": {"enabled": True, "profile_step": 1},
    }
    engine = deepspeed.initialize(model=model(), config=config)[0]
    numel = sum(param.numel() for param in engine.module.parameters())
    for _ in range(3):
        engine.backward(engine(torch.ones(512, 256, device="cuda", dtype=torch.bfloat16)).float().mean())
        engine.step()
    peak = engine.memory_profiler.peak
    assert peak.module is not None
    assert (peak.kinds["masters"], peak.kinds["moments"]) == (4 * numel, 8 * numel)
    assert peak.kinds["everything else"] < 0.3 * peak.total
    engine.destroy()
