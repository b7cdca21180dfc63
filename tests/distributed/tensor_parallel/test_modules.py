"""Layers that a script makes of whole ones, against these: outputs, gradients, and what a rank holds."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from deepspeed.module_inject import layers
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.tensor_parallel import splits_of, whole_parameters
from tests.harness import ranks

WIDTH = 12


def linear(inputs=WIDTH, outputs=10, bias=True):
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias)


def given(width=WIDTH):
    return torch.randn(2, 3, width, generator=torch.Generator().manual_seed(1))


def held(module):
    """Each rank's interval of the split dim, in order."""
    return module.share.splits["weight"].parts[dist.get_rank()]


def part(whole, module, dim=-1):
    return torch.cat([whole.narrow(dim, start, stop - start) for start, stop in held(module)], dim)


def close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def check(whole, made, *, split_input=False, split_output=False, x=None):
    """Output, gradients of the input and of all parameters, and the whole weights of all parts."""
    x = given() if x is None else x
    trains = x.is_floating_point()
    mine = (part(x, made) if split_input else x).clone().requires_grad_(trains)
    wanted_input = x.clone().requires_grad_(trains)
    wanted = whole(wanted_input)
    factor = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2))
    (wanted * factor).sum().backward()
    found = made(mine)
    close(found, part(wanted, made) if split_output else wanted)
    (found * (part(factor, made) if split_output else factor)).sum().backward()
    if trains:
        close(mine.grad, part(wanted_input.grad, made) if split_input else wanted_input.grad)
    for name, param in whole.named_parameters():
        split, mine = made.share.splits.get(name), dict(made.named_parameters())[name]
        close(mine.grad, param.grad if split is None else split.cut(param.grad, dist.get_rank()))
        close(whole_parameters(made).get(id(mine), mine.detach()), param.detach())


@ranks(3)
def test_linear_layers():
    world = dist.group.WORLD
    for bias in (True, False):  # 10 outputs and 13 inputs over 3 ranks do not come out even
        check(linear(bias=bias), layers.LinearLayer(linear(bias=bias), world), split_output=True)
        check(linear(bias=bias), layers.LinearLayer(linear(bias=bias), world, gather_output=True))
        wide = given(13)
        check(linear(13, bias=bias), layers.LinearAllreduce(linear(13, bias=bias), world), split_input=True, x=wide)
    alone = layers.LinearLayer(linear(), None)
    close(alone(given()), linear()(given()))
    with pytest.raises(UsageError, match="unknown arguments strange"):
        layers.LinearLayer(linear(), world, strange=1)


@ranks(2)
def test_parameters_whole_for_a_while():
    world = dist.group.WORLD
    model = nn.Sequential(layers.LinearLayer(linear(), world), layers.LinearAllreduce(linear(10, WIDTH), world))
    parts = [param.detach().clone() for param in model.parameters()]
    with layers.GatherReplacedLayerParams(model.parameters(), model):
        close(model[0].weight.data, linear().weight.data)
        model[1].weight.data += 1
    parts[2] += 1
    for found, wanted in zip(model.parameters(), parts, strict=True):
        close(found.detach(), wanted)
    assert model[0].weight.shape == (5, WIDTH)
    assert set(splits_of(model)) == {"0.weight", "0.bias", "1.weight"}
