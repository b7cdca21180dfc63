"""Graphs of any module, over a device that is simulated: a replay computes again and writes the same tensors."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

from deepspeed.generate import graphs
from deepspeed.generate.graphs import GraphedModule


class _Stream:
    def wait_stream(self, other):
        pass


class _Graph:
    def __init__(self):
        self.call = self.result = None

    def pool(self):
        return "memory"


class Device:
    """What the graphs ask of an accelerator."""

    Stream = current_stream = lambda self: _Stream()
    create_graph = lambda self: _Graph()  # noqa: E731
    stream = staticmethod(nullcontext)

    def __init__(self):
        self.captured = 0

    def device_name(self):
        return "cpu"

    @contextmanager
    def capture_to_graph(self, graph, pool=None):
        self.captured += 1
        yield

    def replay_graph(self, graph):
        graph.result.copy_(graph.call())


@pytest.fixture
def device(monkeypatch):
    found = Device()
    monkeypatch.setattr(graphs, "get_accelerator", lambda: found)
    capture = graphs.GraphPool._capture

    def noted(self, call):
        graph, result = capture(self, call)
        graph.call, graph.result = call, result
        return graph, result

    monkeypatch.setattr(graphs.GraphPool, "_capture", noted)
    return found


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(4, 4).eval()


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad])
def test_a_graph_serves_every_mode(device, model, first):
    graphed = GraphedModule(model)
    for mode in (first, torch.no_grad, torch.inference_mode, torch.no_grad):
        with mode():
            x = torch.randn(3, 4)
            torch.testing.assert_close(graphed(model, x), model(x))
    assert device.captured == 1


def test_what_is_not_of_a_captured_call_is_computed_by_the_module(device):
    seen = []

    def forward(x, scale=1):
        seen.append((torch.is_autocast_enabled("cpu"), type(scale)))
        return x * scale

    graphed = GraphedModule(nn.Identity())
    with torch.no_grad():
        x = torch.ones(2, dtype=torch.int64)
        assert graphed(forward, x).dtype == torch.int64
        assert graphed(forward, x, scale=1).dtype == torch.int64
        assert graphed(forward, x, scale=1.0).dtype == torch.float32
        assert device.captured == 3
        with torch.autocast("cpu", torch.bfloat16):
            graphed(forward, x, scale=1)
    assert device.captured == 3
    assert seen[-1] == (True, int)


def test_inputs_leave_with_their_graphs(device, model):
    graphed = GraphedModule(model, most=2)
    with torch.no_grad():
        for rows in (1, 2, 3, 4, 5, 4, 1):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(graphed(model, x), model(x))
            assert len(graphed._inputs) <= 3


def test_a_wrong_input_ends_no_graphs(device, model):
    graphed = GraphedModule(model)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="shapes"):
            graphed(model, torch.randn(3, 5))
        graphed(model, torch.randn(3, 4))
    assert device.captured == 1
