"""The layers that ranks share. A layer keeps its object, names, hooks and parameters, on which optimizers rely.

Each class below is put before the layer's own by `class_before`, so that `isinstance(layer, nn.Linear)` stays true;
`in_features` and `out_features` tell what lies here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from deepspeed.errors import UsageError
from deepspeed.parallel.regions import ParameterCut, RankGroup, Way, between, enter, joined, leave, own, summed_part
from deepspeed.tensor_parallel.overlap import OverlappedInput, SharedInput, Uncopied, overlapped_sum


@dataclass
class SplitSequence(Uncopied):
    """Splits hidden states [batch, sequence, hidden] from the first block of a model to the last.

    Only in training: sequences of any length, such as those of a generation, pass whole in eval mode.
    """

    axis: RankGroup
    active: bool = False
    """Whether the pass that goes on now has split sequences; the first block decides, in backward what it decided."""

    def begin(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """At the first block: this rank's part of the sequence."""
        if torch._C._current_graph_task_id() == -1:  # no backward computes it again
            self.active = block.training
        if not self.active:
            return hidden
        if hidden.shape[1] % self.axis.size:
            raise UsageError(
                f"tensor_parallel.sequence_parallel: sequences of {hidden.shape[1]} tokens do not divide by "
                f"{self.axis.size} ranks; pad them to a multiple of {self.axis.size}"
            )
        return self._between(hidden, hidden.shape[1] // self.axis.size, (own, joined))

    def go_on(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """At a later block, which may be the first one here: what the block before it gave, as it is."""
        self.active = block.training
        return hidden

    def enter(self, hidden: Tensor) -> Tensor:
        """Into a split region, which takes the whole sequence."""
        if not self.active:
            return enter(hidden, self.axis)
        return self._between(hidden, hidden.shape[1], (joined, summed_part))

    def leave(self, output: Tensor) -> Tensor:
        """Out of a split region."""
        if not self.active:
            return leave(output, self.axis, fresh=True)
        return self._between(output, output.shape[1] // self.axis.size, (summed_part, joined))

    def end(self, hidden: Tensor) -> Tensor:
        """Behind the last block: the whole sequence."""
        if not self.active:
            return hidden
        return self._between(hidden, hidden.shape[1], (joined, own))

    def remember(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Behind all blocks: their backward, which may compute them again, goes as this pass went.

        Another pass may lie between both, such as one of an evaluation.
        """
        active = self.active

        def resume(_grad: Tensor) -> None:
            self.active = active

        for each in tree_leaves(output):
            if type(each) is Tensor and each.requires_grad:  # what is computed only if looked at stays that
                each.register_hook(resume)

    def _between(self, tensor: Tensor, part: int, ways: tuple[Way, Way]) -> Tensor:
        return between(tensor, self.axis, [part] * self.axis.size, 1, ways)


@dataclass
class ShardInfo(ParameterCut):
    """What a split layer knows of the others."""

    sizes: tuple[int, ...]
    """Of the split dim of the activation, by rank."""
    entrance: SharedInput
    """Shared by all layers of a model."""
    transposed: bool = False
    """The weight is [in, out], as GPT-2 has it."""
    gather_output: bool = False
    split_input: bool = False
    gate: OverlappedInput | None = None
    """Shared by all layers of a model whose sums over ranks run beside products."""
    sequence: SplitSequence | None = None
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
    share: ShardInfo
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
            output = between(output, share.axis, share.sizes, -1, (joined, own))
        if share.gather_output:
            share.forget()
        return output


class RowParallel(_Shared):
    """Computes a summand of all outputs from this rank's inputs; the bias is added once, to the sum."""

    def forward(self, input: Tensor) -> Tensor:
        share = self.share
        share.forget()
        inputs = between(input, share.axis, share.sizes, -1, (own, joined)) if share.split_input else input
        if share.gate is not None and not share.transposed and torch.is_grad_enabled():
            output = overlapped_sum(inputs, self.weight, share.axis)
            return output if self.bias is None else output + self.bias
        output = self.product(inputs, with_bias=False)
        output = leave(output, share.axis, fresh=True) if share.sequence is None else share.sequence.leave(output)
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
        return leave(found.masked_fill(foreign.unsqueeze(-1), 0), share.axis, fresh=True)


class ExpertsParallel(_Shared):
    """Experts of which each rank holds a part of the inner width, and computes a summand of the output."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        axis = self.share.axis
        entered = [enter(a, axis) if _is_activation(a) else a for a in args]
        named = {key: enter(a, axis) if _is_activation(a) else a for key, a in kwargs.items()}
        return leave(super().forward(*entered, **named), axis)


def share_of(module: nn.Module) -> ShardInfo | None:
    """What a layer knows of the others; None if it is not split."""
    share = getattr(module, "share", None)
    return share if isinstance(share, ShardInfo) else None


def _rows(tensor: Tensor, rows: tuple[tuple[int, int], ...]) -> Tensor:
    parts = [tensor[start:stop] for start, stop in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _is_activation(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
