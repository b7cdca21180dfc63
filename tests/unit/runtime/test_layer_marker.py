"""Layers of Transformers mark their inputs while an offload of hidden states is open, and no longer."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from deepspeed.runtime.activation_checkpointing import offload_activations
from deepspeed.runtime.activation_checkpointing.offload_activations import (
    MARKER,
    CheckpointHiddenStatesOffload,
    patch_gradient_checkpointing_layer_marker,
)

LAYERS = 4


@pytest.fixture(autouse=True)
def host(monkeypatch):
    """The only device here is the host."""
    monkeypatch.setattr(offload_activations, "on_device", lambda tensor: True)


def forward(layers, x):
    out = x * 1
    for layer in layers:
        out = layer(out)
    return out


def transformers_layers():
    modeling = pytest.importorskip("transformers.modeling_layers")

    class Marked(modeling.GradientCheckpointingLayer):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.gradient_checkpointing = True
            self._gradient_checkpointing_func = partial(torch_checkpoint, use_reentrant=False)

        def forward(self, hidden_states):
            return self.linear(hidden_states).relu()

    return modeling.GradientCheckpointingLayer, Marked


@pytest.mark.slow
def test_layers_of_transformers_mark_their_inputs():
    kind, Marked = transformers_layers()
    original = kind.__call__
    offload, layers = CheckpointHiddenStatesOffload(), [Marked() for _ in range(LAYERS)]
    x = torch.randn(32, 64, requires_grad=True)
    with offload, torch.no_grad():
        assert kind.__call__ is not original
    assert kind.__call__ is original
    with offload:
        out = forward(layers, x)
    assert offload.stats.marked_tensors == LAYERS <= offload.stats.saved_tensors_seen  # torch 2.11 saves one more each
    out.sum().backward()
    found = x.grad.clone()
    x.grad = None
    forward(layers, x).sum().backward()
    assert torch.equal(found, x.grad)
    for layer in layers:
        layer.eval()
    with offload:
        forward(layers, x)
    assert offload.stats.marked_tensors == 0


def test_the_innermost_context_gets_the_mark_and_both_take_the_wrapper_off():
    kind, Marked = transformers_layers()
    original, layer = kind.__call__, Marked()
    outer, inner = CheckpointHiddenStatesOffload(), CheckpointHiddenStatesOffload()
    x = torch.randn(32, 64, requires_grad=True) * 1
    with outer:
        with inner:
            layer(x)
        assert kind.__call__ is not original
        layer(x)
    assert (inner.stats.marked_tensors, outer.stats.marked_tensors) == (1, 1)
    assert kind.__call__ is original


def test_layers_stay_marked_where_that_was_asked_for():
    kind, Marked = transformers_layers()
    original = kind.__call__
    try:
        patch_gradient_checkpointing_layer_marker()
        patched = kind.__call__
        patch_gradient_checkpointing_layer_marker()
        assert kind.__call__ is patched is not original
        offload = CheckpointHiddenStatesOffload()
        with offload:
            Marked()(torch.randn(32, 64, requires_grad=True) * 1)
        assert offload.stats.marked_tensors == 1
        assert kind.__call__ is patched
    finally:
        kind.__call__ = original
        MARKER.__init__()


def test_transformers_is_not_loaded_for_a_context_and_named_where_it_lacks(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.modeling_layers", None)
    with CheckpointHiddenStatesOffload():
        pass
    with pytest.raises(RuntimeError, match="found no transformers with GradientCheckpointingLayer"):
        patch_gradient_checkpointing_layer_marker()
