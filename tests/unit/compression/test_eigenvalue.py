"""Eigenvalues of Hessians by power iteration, next to those of dense Hessians; and how long bits last by them."""

from __future__ import annotations

import pytest
import torch
from deepspeed.runtime.eigenvalue import Eigenvalue as Published
from torch import nn
from torch.func import functional_call, hessian

from deepspeed.compression.eigenvalue import Eigenvalue
from deepspeed.compression.layer_state import BitPace, WeightRounding
from deepspeed.errors import UsageError


class Blocks(nn.Module):
    """Tanh layers of unlike sizes of weights, and a linear one."""

    def __init__(self, sizes=(3.0, 0.2, 1.0)):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in sizes)
        self.head = nn.Linear(3, 1)
        with torch.no_grad():
            for layer, size in zip(self.layers, sizes, strict=True):
                layer.weight.mul_(size)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).square().mean()


def dense(model, x):
    """The largest eigenvalue of each block by magnitude, from whole Hessians."""
    found = []
    values = {name: param.detach() for name, param in model.named_parameters()}
    for number in range(len(model.layers)):
        names = [name for name in values if name.startswith(f"layers.{number}.")]
        flat = torch.cat([values[name].flatten() for name in names])

        def loss(vector, names=names):
            parts = vector.split([values[name].numel() for name in names])
            own = {name: part.view(values[name].shape) for name, part in zip(names, parts, strict=True)}
            return functional_call(model, {**values, **own}, (x,))

        each = torch.linalg.eigvalsh(hessian(loss)(flat))
        found.append(float(each[each.abs().argmax()]))
    return found


def test_power_iteration_finds_the_largest_eigenvalue_of_each_block():
    model, x = Blocks(), torch.randn(16, 3, generator=torch.Generator().manual_seed(1))
    expected = dense(model, x)
    eigenvalue = Published(max_iter=500, tol=1e-6, stability=0, layer_name="layers")
    for scale in (1.0, 64.0):
        model.zero_grad()
        (model(x) * scale).backward(create_graph=True)
        raw = [
            eigenvalue.power_iteration([p.grad for p in layer.parameters()], list(layer.parameters()), scale=scale)
            for layer in model.layers
        ]
        assert raw == pytest.approx(expected, rel=1e-3)
        found = eigenvalue.compute_eigenvalue(model, scale=scale)
        top = max(map(abs, expected))
        for number, layer in enumerate(model.layers):
            for param in layer.parameters():
                share, block = found[id(param)]
                assert block == number
                assert share == pytest.approx(abs(expected[number]) / top, rel=1e-3)
        assert id(model.head.weight) not in found


def test_the_parts_of_an_eigenvalue():
    each = Eigenvalue(stability=1.0, layer_name="layers", layer_num=2)
    assert each.nan_to_num(torch.tensor([1.0, float("nan"), float("inf")])).tolist() == [1.0, 0.0, 0.0]
    assert each.normalize([torch.tensor([3.0]), torch.tensor([[4.0]])]) == [
        torch.tensor([0.5]),
        torch.tensor([[4 / 6]]),
    ]
    assert float(each.inner_product([torch.ones(2)], [torch.full((2,), 3.0)])) == 6.0
    assert each.post_process([2.0, -4.0, 0.0]) == [0.5, 1.0, 1.0]
    assert len(each.get_layers(Blocks())) == 2
    assert each.power_iteration([None], [torch.ones(1)]) == 0.0
    for name, number, said in (
        ("layer", 0, "eigenvalue.layer_name: the model has no module 'layer'; near names: layers"),
        ("layers", 4, "layer_num is 4, and the model has 3 blocks at 'layers'"),
    ):
        with pytest.raises(UsageError, match=said):
            Eigenvalue(layer_name=name, layer_num=number).get_layers(Blocks())


def test_a_factor_lets_bits_last_longer():
    pace = BitPace.of(WeightRounding(8, 4, period=10))
    steps = []
    for step in range(500):
        pace.factor = 3 if step == 10 else 1
        steps += [step] if pace.advance(step) else []
    assert steps == [10, 60, 120, 240]
    again = BitPace.of(WeightRounding(8, 4, period=10))
    again.factors = [3]
    assert (again.advance(119), again.bits, again.edge) == (True, 6, 120)
