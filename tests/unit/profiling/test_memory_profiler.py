"""`MemoryProfiler` in a loop of one's own."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from deepspeed.errors import UsageError
from deepspeed.fusion.head import put_off
from deepspeed.profiling.memory_profiler import MemoryProfiler


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4096), nn.ReLU()), nn.Linear(4096, 1))


def test_forward_and_backward_are_told_without_an_engine():
    net = model()
    with MemoryProfiler(net) as profiler, torch.no_grad():
        net(torch.ones(64, 8))
    peak = profiler.peak
    assert (peak.phase, peak.module, peak.operation) == ("forward", "1.1", "aten.relu")
    assert (peak.activations["1.0"], peak.activations["1.1"]) == (64 * 4096 * 4, 64 * 4096 * 4)
    assert peak.kinds["activations"] == sum(peak.activations.values())
    assert peak.kinds["parameters"] == sum(param.numel() for param in net.parameters()) * 4
    with MemoryProfiler(net) as profiler:
        net(torch.ones(64, 8)).sum().backward()
    assert (profiler.peak.phase, profiler.peak.module) == ("backward", "1.1")
    with MemoryProfiler(net) as profiler:
        net(torch.ones(64, 8))
    assert profiler.peak.phase == "forward"
    assert profiler.peak.kinds["gradients"] == profiler.peak.kinds["parameters"]


def test_nothing_is_left_behind_and_starting_twice_is_an_error():
    net, hooks = model(), lambda net: sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules())
    profiler = MemoryProfiler(net)
    assert profiler.peak is None
    profiler.start()
    with pytest.raises(UsageError, match="running already"):
        profiler.start()
    profiler.stop()
    profiler.stop()
    assert profiler.peak is None
    assert hooks(net) == 0
    assert not _get_current_dispatch_mode_stack()
    assert not any(param._backward_hooks for param in net.parameters())


def test_two_that_end_in_the_order_of_their_beginning():
    one, two = MemoryProfiler(nn.Linear(4, 4)), MemoryProfiler(model())
    one.start()
    two.start()
    one.stop()
    two.model(torch.ones(64, 8))
    two.stop()
    assert one.peak is None
    assert two.peak.module == "1.1"
    assert not _get_current_dispatch_mode_stack()


def test_an_exception_inside_a_module_does_not_confuse():
    class Raises(nn.Module):
        def forward(self, x):
            raise ValueError("stop")

    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), Raises()))
    with MemoryProfiler(net) as profiler:
        with pytest.raises(ValueError, match="stop"):
            net(torch.ones(2, 4))
        net[0](torch.ones(4096, 4))
    assert profiler.peak.module == "0"


def test_logits_that_nobody_looks_at_are_not_computed_for_it():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 100)

        def forward(self, x):
            return put_off(self.head, x, 100, x.dtype), x.sum()

    net, x = Model(), torch.ones(3, 4, requires_grad=True)
    with MemoryProfiler(net):
        logits, loss = net(x)
        loss.backward()
    assert not logits.computed, "the profiler has looked at them"
