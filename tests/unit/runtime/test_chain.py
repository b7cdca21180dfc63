"""Several layers per checkpoint: gradients as without, fewer inputs kept, and layers that do not follow each other."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from deepspeed.errors import UsageError
from deepspeed.runtime.activation_checkpointing import offload_activations
from deepspeed.runtime.activation_checkpointing.offload_activations import CheckpointHiddenStatesOffload

LAYERS = 5


@pytest.fixture(autouse=True)
def host(monkeypatch):
    """The only device here is the host."""
    monkeypatch.setattr(offload_activations, "on_device", lambda tensor: True)


def layers(*, reentrant=False, tuples=False):
    modeling = pytest.importorskip("transformers.modeling_layers")

    class Layer(modeling.GradientCheckpointingLayer):
        def __init__(self):
            super().__init__()
            self.linear, self.dropout = nn.Linear(64, 64), nn.Dropout(0.5)
            self.gradient_checkpointing = True
            self._gradient_checkpointing_func = partial(torch_checkpoint, use_reentrant=reentrant)
            self.ran = 0

        def forward(self, hidden_states, scale=None):
            self.ran += 1
            out = hidden_states + self.dropout(self.linear(hidden_states * scale).tanh())
            return (out, None) if tuples else out

    torch.manual_seed(0)
    return [Layer() for _ in range(LAYERS)]


def trained(made, offload=None, *, between=lambda hidden: hidden):
    """The output and all gradients; the second time over, so that nothing is left of the first."""
    for _ in range(2):
        torch.manual_seed(1)
        x = torch.randn(32, 64, requires_grad=True)
        for layer in made:
            layer.zero_grad()
            layer.ran = 0
        out = x * 1

        def forward(out):
            for number, layer in enumerate(made):
                result = layer(between(out), scale=torch.tensor(1.0 + number))
                out = result[0] if isinstance(result, tuple) else result
            return out

        if offload is None:
            out = forward(out)
        else:
            with offload:
                out = forward(out)
        out.square().mean().backward()
    return [out.detach(), x.grad, *(param.grad for layer in made for param in layer.parameters())]


def chained(count, **options):
    offload = CheckpointHiddenStatesOffload(keep_last_count=0, **options)
    offload.layers_per_checkpoint = count
    return offload


@pytest.mark.parametrize("tuples", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("count", "kept"), [(1, 5), (2, 3), (3, 2), (5, 1), (9, 1)])
def test_gradients_are_those_of_a_plain_run(count, kept, reentrant, tuples):
    expected = trained(layers(reentrant=reentrant, tuples=tuples))
    made, offload = layers(reentrant=reentrant, tuples=tuples), chained(count)
    found = trained(made, offload)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert offload.stats.offloaded_tensors == kept
    runs = [layer.ran for layer in made]
    last = [(number + 1) % count == 0 or number == LAYERS - 1 for number in range(LAYERS)]
    assert runs == [2 if alone else 3 for alone in last]  # forward, a checkpoint's own, and once more for those behind


def test_what_stays_on_the_device_is_chained_too():
    offload = chained(2, min_offload_bytes=10**9)
    expected, found = trained(layers()), trained(layers(), offload)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert (offload.stats.offloaded_tensors, offload.stats.skipped_marked_tensors) == (0, 3)


@pytest.mark.parametrize(("count", "kept"), [(1, 5), (2, 3), (5, 1)])
def test_inputs_that_are_computed_again_are_not_held(count, kept):
    made, seen = layers(), []
    for layer in made:
        layer.register_forward_pre_hook(lambda module, given: seen.append(StorageWeakRef(given[0].untyped_storage())))
    with chained(count, min_offload_bytes=10**9):
        out = torch.randn(32, 64, requires_grad=True) * 1
        for layer in made:
            out = layer(out, scale=torch.tensor(1.0))
    gc.collect()
    assert sum(not storage.expired() for storage in seen) == kept
    out.sum().backward()


def test_an_input_that_is_not_the_last_output_begins_a_chain():
    def between(hidden):
        return hidden + 1

    offload = chained(LAYERS)
    found, expected = trained(layers(), offload, between=between), trained(layers(), between=between)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert offload.stats.offloaded_tensors == LAYERS


def test_an_output_that_was_changed_in_place_begins_a_chain():
    made, offload = layers(), chained(LAYERS)
    with offload:
        out = made[0](torch.randn(32, 64, requires_grad=True) * 1, scale=torch.tensor(1.0))
        made[1](out.add_(1), scale=torch.tensor(1.0)).sum().backward()
    assert offload.stats.offloaded_tensors == 2


def test_a_graph_that_is_used_twice():
    made, offload = layers(), chained(3)
    x = torch.randn(32, 64, requires_grad=True)
    with offload:
        out = x * 1
        for layer in made:
            layer.dropout.p = 0.0
            out = layer(out, scale=torch.tensor(0.5))
    (first,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(first, second)


@pytest.mark.parametrize("count", [0, True, 1.5])
def test_a_wrong_count(count):
    with pytest.raises(UsageError, match="layers_per_checkpoint"):
        chained(count)
