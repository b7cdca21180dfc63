"""TiledLinear does what nn.Linear does, forward and backward, however it is cut."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.zero.public.tiling import TiledLinear, TiledLinearReturnBias, split_tensor_along_last_dim

SPLITS = [(1, 1), (2, 3), (3, 2), (7, 5), (1, 5), (7, 1)]


def reference(tiled, x):
    """A plain layer with the tiles' values, its output, and gradients for weight, bias and input."""
    linear = nn.Linear(tiled.in_features, tiled.out_features, bias=tiled.use_bias).double()
    with torch.no_grad():
        linear.weight.copy_(torch.cat([torch.cat([tile.weight for tile in row], 1) for row in tiled.linears], 0))
        if tiled.use_bias:
            linear.bias.copy_(torch.cat([row[-1].bias for row in tiled.linears]))
    return linear, linear(x)


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize(
    ("bias", "already", "combine"), list(itertools.product([True, False], repeat=3)), ids=lambda flag: "NY"[flag]
)
def test_parity(splits, bias, already, combine):
    torch.manual_seed(0)
    tiled = TiledLinear(7, 5, bias, *splits, input_is_already_split=already, combine_out_splits=combine).double()
    x = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    linear, expected = reference(tiled, y)
    sizes = [stop - start for start, stop in itertools.pairwise(tiled.in_parts)]
    given = list(split_tensor_along_last_dim(x, sizes)) if already else x
    output = tiled(given)
    if not combine:
        assert isinstance(output, list)
        assert [part.shape[-1] for part in output] == [b - a for a, b in itertools.pairwise(tiled.out_parts)]
        output = torch.cat(output, -1)
    torch.testing.assert_close(output, expected)
    weights = torch.randn_like(expected)
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    grads = torch.cat([torch.cat([tile.weight.grad for tile in row], 1) for row in tiled.linears], 0)
    torch.testing.assert_close(grads, linear.weight.grad)
    if bias:
        torch.testing.assert_close(torch.cat([row[-1].bias.grad for row in tiled.linears]), linear.bias.grad)


def test_every_tile_is_a_module_and_the_bias_is_in_the_last_of_a_row():
    tiled = TiledLinear(10, 7, in_splits=3, out_splits=2)
    assert {name: tuple(value.shape) for name, value in tiled.state_dict().items()} == {
        "linears.0.0.weight": (4, 4),
        "linears.0.1.weight": (4, 3),
        "linears.0.2.weight": (4, 3),
        "linears.0.2.bias": (4,),
        "linears.1.0.weight": (3, 4),
        "linears.1.1.weight": (3, 3),
        "linears.1.2.weight": (3, 3),
        "linears.1.2.bias": (3,),
    }
    assert (tiled.in_parts, tiled.out_parts) == ([0, 4, 7, 10], [0, 4, 7])
    seen = []
    for row in tiled.linears:
        for tile in row:
            tile.register_forward_hook(lambda module, *_: seen.append(module))
    tiled(torch.ones(10))
    assert seen == [tile for row in tiled.linears for tile in row]
    assert "in_splits=3, out_splits=2" in repr(tiled)


@pytest.mark.parametrize("bias", [True, False])
def test_values_of_another_layer(bias):
    linear = nn.Linear(9, 11, bias=bias)
    tiled = TiledLinear(9, 11, bias=bias, in_splits=4, out_splits=3, init_linear=linear)
    x = torch.randn(5, 9)
    torch.testing.assert_close(tiled(x), linear(x))
    other = nn.Linear(9, 11, bias=bias)
    tiled.copy_params_from(other)
    torch.testing.assert_close(tiled(x), other(x))
    assert all(param.requires_grad and param.is_leaf for param in tiled.parameters())


def test_arguments_of_the_class_of_tiles():
    class Recorded(nn.Linear):
        def __init__(self, *args, mark, **kwargs):
            super().__init__(*args, **kwargs)
            self.mark = mark

    tiled = TiledLinear(4, 4, out_splits=2, linear_cls=Recorded, mark="x", dtype=torch.float64)
    assert [row[0].mark for row in tiled.linears] == ["x", "x"]
    assert tiled.linears[0][0].weight.dtype == torch.float64


class Apart(nn.Linear):
    """As Megatron's layers: the bias is returned, not added."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight), self.bias


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_bias_returned(splits, bias):
    linear = nn.Linear(7, 5, bias=bias)
    make = {"bias": bias, "in_splits": splits[0], "out_splits": splits[1], "linear_cls": Apart, "init_linear": linear}
    x = torch.randn(3, 7)
    output, returned = TiledLinearReturnBias(7, 5, **make)(x)
    torch.testing.assert_close(output, x @ linear.weight.t())
    assert (returned is None) == (not bias)
    if bias:
        torch.testing.assert_close(returned, linear.bias)
    pairs = TiledLinearReturnBias(7, 5, **make, combine_out_splits=False)(x)
    assert [pair[0].shape[-1] for pair in pairs] == [len(part) for part in torch.arange(5).tensor_split(splits[1])]
    assert all((pair[1] is None) == (not bias) for pair in pairs)


def test_misuse():
    for wrong in ({"in_splits": 0}, {"in_splits": 11}, {"out_splits": 0}, {"out_splits": 8}):
        with pytest.raises(UsageError, match=r"must be from 1 to (in_features = 10|out_features = 7)"):
            TiledLinear(10, 7, **wrong)
    tiled = TiledLinear(10, 7, in_splits=2)
    with pytest.raises(UsageError, match=r"10 elements.*\(2, 9\)"):
        tiled(torch.ones(2, 9))
    with pytest.raises(UsageError, match="takes a tensor, found 2 tensors"):
        tiled([torch.ones(5), torch.ones(5)])
    split = TiledLinear(10, 7, in_splits=2, input_is_already_split=True)
    with pytest.raises(UsageError, match=r"2 tensors whose last dims are .5, 5., found Tensor"):
        split(torch.ones(10))
    with pytest.raises(UsageError, match=r"found 2 tensors whose last dims are .4, 6."):
        split([torch.ones(4), torch.ones(6)])
    with pytest.raises(UsageError, match=r"\(7, 9\), expected \(7, 10\)"):
        tiled.copy_params_from(nn.Linear(9, 7))
    with pytest.raises(UsageError, match="no bias"):
        tiled.copy_params_from(nn.Linear(10, 7, bias=False))
    with pytest.raises(UsageError, match="use TiledLinear"):
        TiledLinearReturnBias(4, 4)(torch.ones(4))


def test_split_along_the_last_dim():
    x = torch.arange(20.0).view(2, 10)
    parts = split_tensor_along_last_dim(x, [4, 3, 3])
    assert [tuple(part.shape) for part in parts] == [(2, 4), (2, 3), (2, 3)]
    assert parts[1].data_ptr() == x[:, 4:].data_ptr()
    assert [part.shape[-1] for part in split_tensor_along_last_dim(x, 3)] == [3, 3, 3, 1]
    copies = split_tensor_along_last_dim(x, [4, 6], contiguous_split_chunks=True)
    assert all(part.is_contiguous() for part in copies)
    assert torch.equal(torch.cat(copies, -1), x)
