"""Tiles along the sequence: the same numbers, gradients that arrive once, and less memory."""

from __future__ import annotations

import gc

import pytest
import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import (
    SequenceTiledCompute,
    TiledFusedLogitsLoss,
    TiledMLP,
    sequence_tiled_compute,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.errors import UsageError

BATCH, LENGTH, WIDTH, INNER = 2, 10, 8, 64


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.up(x)))


def hidden():
    torch.manual_seed(1)
    return torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)


def outcome(module, x, out):
    """A result, the gradients of everything, and how often each parameter got one."""
    arrivals = []
    hooks = [p.register_post_accumulate_grad_hook(lambda param: arrivals.append(param)) for p in module.parameters()]
    (out**2).sum().backward()
    for hook in hooks:
        hook.remove()
    assert len(arrivals) == len({id(each) for each in arrivals}) == len(hooks)
    return [out.detach(), x.grad, *(param.grad for param in module.parameters())]


def same(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shards", [1, 3, 5, 10, 25])
def test_mlp(shards):
    plain, x = MLP(), hidden()
    expected = outcome(plain, x, plain(x))
    tiled, y = MLP(), hidden()
    params = list(tiled.parameters())
    same(outcome(tiled, y, TiledMLP.apply(MLP.forward, tiled, y, shards, params)), expected)
    flat, z = MLP(), hidden()
    rows = TiledMLP.apply(MLP.forward, flat, z.flatten(0, 1), shards, None)
    same(outcome(flat, z, rows.view(z.shape)), expected)


def loss_of(self, x, y, mask=None):
    """As published scripts write it: tokens come in one row, and a mask only where one was given."""
    assert x.shape == (len(y), WIDTH), "no batch"
    losses = torch.nn.functional.cross_entropy(self(x), y, reduction="none")
    return losses.sum() if mask is None else (losses * mask).sum()


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shards", [1, 3, 4])
def test_logits_and_loss(shards, masked, reduction):
    labels = torch.randint(5, (BATCH, LENGTH), generator=torch.Generator().manual_seed(2))
    mask = torch.arange(LENGTH).expand(BATCH, LENGTH) % 3 > 0 if masked else None
    outcomes = []
    for tiled in (False, True):
        torch.manual_seed(3)
        head, x = nn.Linear(WIDTH, 5), hidden()
        params = list(head.parameters())
        if tiled:
            loss = TiledFusedLogitsLoss.apply(loss_of, head, x, labels, mask, shards, params, reduction)
        else:
            loss = loss_of(head, x.flatten(0, 1), labels.flatten(), None if mask is None else mask.flatten())
            loss = loss / shards if reduction == "mean" else loss
        outcomes.append(outcome(head, x, loss))
    same(*outcomes)


@pytest.mark.parametrize(
    ("shapes", "found"),
    [
        (((2, 10, 8), (2, 9), None), r"x \(2, 10, 8\), y \(2, 9\)"),
        (((10, 8), (10,), None), r"x \(10, 8\), y \(10,\)"),
        (((2, 10, 8), (2, 10), (10,)), r"mask \(10,\)"),
        (((2, 10, 8), (2, 10), (1, 10)), r"mask \(1, 10\)"),
    ],
)
def test_labels_and_masks_that_do_not_fit(shapes, found):
    x, y, mask = (None if shape is None else torch.zeros(shape) for shape in shapes)
    with pytest.raises(UsageError, match=f"found .*{found}; expected x and y as"):
        TiledFusedLogitsLoss.apply(loss_of, nn.Linear(WIDTH, 5), x, y, mask, 2, None, "sum")


def test_any_computation():
    weight = torch.tensor(2.0)
    labels = torch.arange(LENGTH).expand(BATCH, LENGTH)

    def fn(x, labels, weight, mlp):
        return mlp(x) * weight, x * labels[..., None]

    plain, x = MLP(), hidden()
    expected = outcome(plain, x, torch.cat(fn(x, labels, weight, plain), -1))
    for way in ("function", "class"):
        tiled, y = MLP(), hidden()
        cut, passed = {"x": y, "labels": labels}, {"weight": weight, "mlp": tiled}
        if way == "function":
            joined = sequence_tiled_compute(fn, LENGTH, 3, cut, passed, "x", None, 1, None)
        else:
            values = (*cut.values(), *passed.values())
            joined = SequenceTiledCompute.apply(fn, LENGTH, 3, [*cut], [*passed], "x", None, 1, None, *values)
        same(outcome(tiled, y, torch.cat(joined, -1)), expected)


@pytest.mark.parametrize(
    ("dim", "reduction", "expected"),
    [
        (1, None, lambda x: x * 2),
        (1, "mean", lambda x: (x * 2).mean()),
        (1, "sum", lambda x: (x * 2).sum()),
        (0, None, lambda x: torch.stack((x * 2).split(5, 1))),
    ],
)
def test_what_becomes_of_outputs(dim, reduction, expected):
    x = hidden()
    found = sequence_tiled_compute(lambda x: x * 2, LENGTH, 2, {"x": x}, {}, "x", None, dim, reduction)
    torch.testing.assert_close(found, expected(x))


@pytest.mark.parametrize("dim", [0, 1])
def test_losses_of_tiles_that_nobody_joins(dim):
    x = hidden()
    found = sequence_tiled_compute(lambda x: x.sum(), LENGTH, 3, {"x": x}, {}, "x", None, dim, None)
    torch.testing.assert_close(found, torch.stack([tile.sum() for tile in x.split(4, 1)]))


def test_dropout_and_autocast_are_those_of_the_forward():
    class Drop(MLP):
        def forward(self, x):
            return self.down(torch.nn.functional.dropout(self.up(x), 0.5))

    module, x = Drop(), hidden()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = TiledMLP.apply(Drop.forward, module, x, 2)
    assert out.dtype == torch.bfloat16
    torch.manual_seed(99)
    out.float().sum().backward()
    # the output's zeros come from the same elements as the gradient's: d out/d bias of `up` is zero where dropped
    assert torch.isfinite(module.up.bias.grad).all()


def test_without_gradients():
    module, x = MLP(), hidden()
    with torch.no_grad():
        torch.testing.assert_close(TiledMLP.apply(MLP.forward, module, x, 3), module(x), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shards": 0}, "number of tiles is 0"),
        ({"seqlen": 7}, "x is to be cut into tiles of a sequence of 7; found \\(2, 10, 8\\)"),
        ({"grad_requiring_tensor_key": "y"}, "'y', which is none of what is cut into tiles: \\['x'\\]"),
        ({"output_reduction": "max"}, "output_reduction is 'max'; expected None, 'mean' or 'sum'"),
    ],
)
def test_refusals(arguments, message):
    given = {"fn": lambda x: x, "seqlen": LENGTH, "shards": 2, "grad_requiring_tensor_key": "x", **arguments}
    with pytest.raises(UsageError, match=message):
        sequence_tiled_compute(kwargs_to_shard={"x": hidden()}, kwargs_to_pass={}, **given)


class Peak(TorchDispatchMode):
    """The most elements that were alive at once of tensors as wide as the inside of the MLP."""

    def __init__(self):
        super().__init__()
        self.alive, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(each, torch.Tensor) and each.dim() > 1 and each.shape[-1] == INNER:
                storage = each.untyped_storage()
                self.alive[storage.data_ptr()] = (
                    torch.multiprocessing.reductions.StorageWeakRef(storage),
                    storage.nbytes(),
                )
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return found


def peak_of(shards):
    module = MLP()
    x = torch.randn(1, 400, WIDTH, requires_grad=True)
    gc.collect()
    with Peak() as peak:
        out = module(x) if shards is None else TiledMLP.apply(MLP.forward, module, x, shards)
        out.sum().backward()
    return peak.most


def test_memory_is_that_of_a_tile():
    """The inside is as often there as without tiles, but of a tile's length; the weights' gradients are apart."""
    whole, tiled = peak_of(None), peak_of(8)
    inside, weight = 400 * INNER * 4, WIDTH * INNER * 4
    assert whole >= 3 * inside
    assert tiled <= 3 * inside / 8 + 6 * weight
