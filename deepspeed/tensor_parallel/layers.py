"""The layers that ranks share. A layer keeps its object, names and hooks: it only gets another class and a `Share`.

[Note: the class changes, not the module] A new module in place of the old one would lose hooks, wrappers that hold on
to it, and its parameters' identity, on which optimizers rely. Each class below is put before the layer's own by
`class_of`, so that `isinstance(layer, nn.Linear)` stays true; `in_features` and `out_features` tell what lies here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.parallel.cut import Cut
from deepspeed.tensor_parallel import regions
from deepspeed.tensor_parallel.overlap import Gate, overlapped_sum
from deepspeed.tensor_parallel.sequence import Sequence

__all__ = ["ColumnParallel", "ExpertsParallel", "RowParallel", "Share", "VocabularyParallel", "class_of", "share_of"]


@dataclass
class Share(Cut):
    """What a split layer knows of the others."""

    sizes: tuple[int, ...]
    """Of the split dim of the activation, by rank."""
    entrance: regions.Entrance
    """Shared by all layers of a model."""
    transposed: bool = False
    """The weight is [in, out], as GPT-2 has it."""
    gather_output: bool = False
    split_input: bool = False
    gate: Gate | None = None
    """Shared by all layers of a model whose sums over ranks run beside products."""
    sequence: Sequence | None = None
    """The activations outside are split along the sequence."""
    rows: tuple[tuple[int, int], ...] | None = None
    """Of a weight that all ranks hold whole: the outputs that this rank needs."""
    keep_split: bool = False
    """Of the output layer: what it returns is split by vocabulary, because the loss takes it so."""

    def forget(self) -> None:
        """The split region is left."""
        self.entrance.forget()
        if self.gate is not None:
            self.gate.forget()


class _Shared(nn.Module):
    share: Share
    weight: Tensor
    bias: Tensor | None

    def extra_repr(self) -> str:
        axis = self.share.axis
        own = super().extra_repr()
        return f"{own}{', ' if own else ''}rank {axis.rank} of {axis.size}"

    def product(self, inputs: Tensor, *, with_bias: bool) -> Tensor:
        weight, bias = self.weight, self.bias if with_bias else None
        if self.share.transposed:
            weight = weight.t()
        if self.share.rows is not None:
            weight = _rows(weight, self.share.rows)
            bias = None if bias is None else _rows(bias, self.share.rows)
        return F.linear(inputs, weight, bias)


class ColumnParallel(_Shared):
    """Computes this rank's outputs from the whole input."""

    def forward(self, input: Tensor) -> Tensor:
        share = self.share
        if share.gate is not None and share.rows is None and not share.transposed and torch.is_grad_enabled():
            output = share.gate.linear(input, self.weight, self.bias)
        else:
            inputs = input if share.sequence is not None else share.entrance(input)
            output = self.product(inputs, with_bias=True)
        if share.gather_output and not share.keep_split:
            output = regions.gather(output, share.axis, share.sizes)
        if share.gather_output:
            share.forget()
        return output


class RowParallel(_Shared):
    """Computes a summand of all outputs from this rank's inputs; the bias is added once, to the sum."""

    def forward(self, input: Tensor) -> Tensor:
        share = self.share
        share.forget()
        inputs = regions.scatter(input, share.axis, share.sizes) if share.split_input else input
        if share.gate is not None and not share.transposed and torch.is_grad_enabled():
            output = overlapped_sum(inputs, self.weight, share.axis)
            return output if self.bias is None else output + self.bias
        output = self.product(inputs, with_bias=False)
        output = regions.leave(output, share.axis) if share.sequence is None else share.sequence.leave(output)
        return output if self.bias is None else output + self.bias


class VocabularyParallel(_Shared):
    """An embedding of which each rank holds some tokens; others give zeros, and the sum is whole.

    `padding_idx` is that of the whole embedding, which an adapter reads.
    """

    padding_idx: int | None

    def forward(self, input: Tensor) -> Tensor:
        share = self.share
        start, stop = share.splits["weight"].parts[share.axis.rank][0]
        foreign = (input < start) | (input >= stop)
        padding = self.padding_idx
        self.padding_idx = padding - start if padding is not None and start <= padding < stop else None
        try:
            found = super().forward((input - start).masked_fill(foreign, 0))
        finally:
            self.padding_idx = padding
        return regions.leave(found.masked_fill(foreign.unsqueeze(-1), 0), share.axis)


class ExpertsParallel(_Shared):
    """Experts of which each rank holds a part of the inner width, and computes a summand of the output."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        axis = self.share.axis
        entered = [regions.enter(a, axis) if _is_activation(a) else a for a in args]
        named = {key: regions.enter(a, axis) if _is_activation(a) else a for key, a in kwargs.items()}
        return regions.leave(super().forward(*entered, **named), axis)


@functools.cache
def _made(kind: Any, original: Any) -> type[nn.Module]:
    return type(f"{kind.__name__}{original.__name__}", (kind, original), {"__module__": __name__})


def class_of(kind: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    """The layer's own class with `kind` before it."""
    return _made(kind, original)  # type: ignore[arg-type]  # mypy takes no class of torch's for hashable


def share_of(module: nn.Module) -> Share | None:
    """What a layer knows of the others; None if it is not split."""
    share = getattr(module, "share", None)
    return share if isinstance(share, Share) else None


def _rows(tensor: Tensor, rows: tuple[tuple[int, int], ...]) -> Tensor:
    parts = [tensor[start:stop] for start, stop in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _is_activation(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
