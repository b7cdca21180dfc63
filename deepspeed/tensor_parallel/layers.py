"""The layers that ranks share. A layer keeps its object, names, hooks and parameters, on which optimizers rely.

Each class below is put before the layer's own by `class_before`, so that `isinstance(layer, nn.Linear)` stays true;
`in_features` and `out_features` tell what lies here.

[Note: overlap] Backward of column layers that read one tensor, such as the three projections of an attention: their
input's gradient is summed once, while the product for the first one's weight runs. Forward of a row layer: its product
is computed in two halves, and the first is summed while the second is computed.

[Note: between start and wait]
Of the nodes that are ready autograd runs the one that was made last. The input of the region passes a node that waits
for the sum in backward (`_WaitSum`), and then one that starts it (`_StartSum`). Between the two the weight of the first
layer passes a node of its own (`_WeightGradient`), which therefore runs between both. It computes the weight's gradient
from the factors that the layer's own node keeps. Another order would only cost time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.parallel.regions import (
    OwnProduct,
    ParameterCut,
    RankGroup,
    Uncopied,
    Way,
    between,
    enter,
    joined,
    leave,
    own,
    summed_part,
)


class _PendingSum:
    """A sum on its way, and the factors of a product that is computed meanwhile."""

    def __init__(self, axis: RankGroup) -> None:
        self.axis = axis
        self.work: Any = None
        self.factors: tuple[Tensor, Tensor] | None = None


class _Node(torch.autograd.Function):
    """What a tensor passes for the sake of its backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, pending: _PendingSum) -> Tensor:
        ctx.pending = pending
        return tensor.view_as(tensor)


class _WaitSum(_Node):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.pending.work is not None:
            ctx.pending.work.wait()
            ctx.pending.work = None
        return grads[0], None


class _StartSum(_Node):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total = grads[0].contiguous()  # a product, or a sum of products, which is nobody else's
        if ctx.pending.axis.size > 1:
            ctx.pending.work = comm.all_reduce(total, group=ctx.pending.axis.group, async_op=True)
        return total, None


class _WeightGradient(_Node):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        assert ctx.pending.factors is not None, "the layer's own node comes before"
        (outputs, inputs), ctx.pending.factors = ctx.pending.factors, None
        return outputs.t().matmul(inputs), None


class _FirstProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, pending: _PendingSum) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.pending, ctx.has_bias = pending, bias is not None
        return torch.nn.functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        inputs, weight = ctx.saved_tensors
        to_weight = to_bias = None
        to_inputs = grad.matmul(weight) if ctx.needs_input_grad[0] else None
        flat = grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[1]:
            ctx.pending.factors = flat, inputs.reshape(-1, inputs.shape[-1])
            to_weight = grad.new_zeros(()).expand(weight.shape)  # in its place; `_WeightGradient` has the gradient
        if ctx.has_bias and ctx.needs_input_grad[2]:
            to_bias = flat.sum(0)
        return to_inputs, to_weight, to_bias, None


class SharedInput(Uncopied):
    """`enter` for layers that read one tensor, such as the three projections of an attention: they share one sum.

    It remembers the last tensor until its region is left, no longer.
    """

    def __init__(self, axis: RankGroup) -> None:
        self._axis = axis
        self._last: tuple[Tensor, tuple[int, bool], Tensor] | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor inside the region."""
        if torch.compiler.is_compiling():
            return enter(tensor, self._axis)
        if tensor.is_inference():
            return tensor
        entered = self._known(tensor)
        return self._remember(tensor, enter(tensor, self._axis)) if entered is None else entered

    def _known(self, tensor: Tensor) -> Tensor | None:
        """What was remembered of a tensor, which is as it was."""
        if self._last is None or self._last[0] is not tensor or self._last[1] != _state(tensor):
            return None
        return self._last[2]

    def _remember(self, tensor: Tensor, entered: Tensor) -> Tensor:
        self._last = tensor, _state(tensor), entered
        return entered

    def forget(self) -> None:
        """The region is left."""
        self._last = None


def _state(tensor: Tensor) -> tuple[int, bool]:
    return tensor._version, torch.is_grad_enabled()


class OverlappedInput(SharedInput):
    """The same, with a sum that runs concurrently with the product for the first layer's weight."""

    def linear(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`linear` of a whole input by this rank's rows; the same numbers as without overlap."""
        known = self._known(inputs)
        if known is not None:
            return torch.nn.functional.linear(known, weight, bias)
        pending = _PendingSum(self._axis)
        arrived = _WaitSum.apply(inputs, pending)  # type: ignore[no-untyped-call]
        _, weight, bias = _cast(inputs, weight, bias)
        late = _WeightGradient.apply(weight, pending)  # type: ignore[no-untyped-call]
        entered = self._remember(inputs, _StartSum.apply(arrived, pending))  # type: ignore[no-untyped-call]
        return _FirstProduct.apply(entered.to(late.dtype), late, bias, pending)  # type: ignore[no-any-return,no-untyped-call]


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, axis: RankGroup) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        rows = inputs.reshape(-1, inputs.shape[-1])
        output = rows.new_empty((*inputs.shape[:-1], weight.shape[0]))
        works = []
        parts = output.view(-1, weight.shape[0]).tensor_split(2)
        halves = [half for half in zip(rows.tensor_split(2), parts, strict=True) if len(half[0])]
        for given, part in halves:
            torch.mm(given, weight.t(), out=part)
            works.append(comm.all_reduce(part, group=axis.group, async_op=True))
        for work in works:
            assert work is not None, "it was asked for"
            work.wait()
        return output  # no view of it, which models could not change in place

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        inputs, weight = ctx.saved_tensors
        to_inputs = grad.matmul(weight) if ctx.needs_input_grad[0] else None
        to_weight = None
        if ctx.needs_input_grad[1]:
            to_weight = grad.reshape(-1, grad.shape[-1]).t().matmul(inputs.reshape(-1, inputs.shape[-1]))
        return to_inputs, to_weight, None


def overlapped_sum(inputs: Tensor, weight: Tensor, axis: RankGroup) -> Tensor:
    """The sum over ranks of `linear` of their inputs by their columns; the same numbers as without overlap."""
    inputs, weight, _ = _cast(inputs, weight, None)
    return _Halves.apply(inputs, weight, axis)  # type: ignore[no-any-return,no-untyped-call]


def _cast(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """As autocast does it with the arguments of a product."""
    if not torch.is_autocast_enabled(inputs.device.type):
        return inputs, weight, bias
    dtype = torch.get_autocast_dtype(inputs.device.type)
    return inputs.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


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

    @property
    def plain(self) -> bool:
        known = self.splits.keys() & {"weight", "gate_up_proj"}
        return bool(known) and not self.transposed and self.rows is None

    @property
    def by_outputs(self) -> bool:
        weight = self.splits.get("weight")
        return self.plain and weight is not None and weight.dim == 0 and not self.gather_output

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
        if isinstance(self, OwnProduct):
            output = self.base_product(inputs, with_bias=with_bias)
            return output if self.share.rows is None else _rows(output, self.share.rows, -1)
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
        plain = share.rows is None and not share.transposed and not isinstance(self, OwnProduct)
        if share.gate is not None and plain and torch.is_grad_enabled():
            output = share.gate.linear(input, self.weight, self.bias)
        else:
            inputs = input if share.sequence is not None else share.entrance(input)
            output = self.product(inputs, with_bias=True)
        if share.gather_output and not share.keep_split:
            output = between(output, share.axis, share.sizes, -1, (joined, own))
        if share.gather_output:
            share.forget()
        return self.adapted(input, output) if isinstance(self, OwnProduct) else output


class RowParallel(_Shared):
    """Computes a summand of all outputs from this rank's inputs; the bias is added once, to the sum."""

    def forward(self, input: Tensor) -> Tensor:
        share = self.share
        share.forget()
        inputs = between(input, share.axis, share.sizes, -1, (own, joined)) if share.split_input else input
        plain = not share.transposed and not isinstance(self, OwnProduct)
        if share.gate is not None and plain and torch.is_grad_enabled():
            output = overlapped_sum(inputs, self.weight, share.axis)
            return output if self.bias is None else output + self.bias
        output = self.product(inputs, with_bias=False)
        output = leave(output, share.axis, fresh=True) if share.sequence is None else share.sequence.leave(output)
        output = output if self.bias is None else output + self.bias
        return self.adapted(input, output) if isinstance(self, OwnProduct) else output


class VocabularyParallel(_Shared):
    """An embedding of which each rank holds some tokens; others give zeros, and the sum is whole.

    `padding_idx` is that of the whole embedding, which an adapter reads.
    """

    padding_idx: int | None
    num_embeddings: int
    first: int
    """The first token that lies here."""

    def forward(self, input: Tensor) -> Tensor:
        share = self.share
        start, stop = self.first, self.first + self.num_embeddings
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
        return leave(self.product(*entered, **named), axis)

    def product(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def share_of(module: nn.Module) -> ShardInfo | None:
    """What a layer knows of the others; None if it is not split."""
    share = getattr(module, "share", None)
    return share if isinstance(share, ShardInfo) else None


def _rows(tensor: Tensor, rows: tuple[tuple[int, int], ...], dim: int = 0) -> Tensor:
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _is_activation(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
