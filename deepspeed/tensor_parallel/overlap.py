"""Products beside sums over ranks, which cost no time then as long as the products last.

Backward of column layers that read one tensor, such as the three projections of an attention: their input's gradient is
summed once, while the product for the first one's weight runs. Forward of a row layer: its product is computed in two
halves, and the first is summed while the second is computed.

[Note: between departure and arrival]
Autograd takes of the nodes that are ready the one that was made last. On its way into the region a tensor passes a node
that waits in backward (`_Arrive`), and then one that begins the sum (`_Depart`); between the two the first layer's
weight passes a node of its own (`_Late`), which therefore has its turn between both. It computes the weight's gradient,
for which the layer's own node only puts its factors aside. Were the order another one, only time would be lost.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.parallel.regions import RankGroup, enter


class _Flight:
    """A sum on its way, and the factors of a product that is computed meanwhile."""

    def __init__(self, axis: RankGroup) -> None:
        self.axis = axis
        self.work: Any = None
        self.factors: tuple[Tensor, Tensor] | None = None


class _Node(torch.autograd.Function):
    """What a tensor passes for the sake of its backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        return tensor.view_as(tensor)


class _Arrive(_Node):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.flight.work is not None:
            ctx.flight.work.wait()
            ctx.flight.work = None
        return grads[0], None


class _Depart(_Node):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total = grads[0].contiguous()  # a product, or a sum of products, which is nobody else's
        if ctx.flight.axis.size > 1:
            ctx.flight.work = comm.all_reduce(total, group=ctx.flight.axis.group, async_op=True)
        return total, None


class _Late(_Node):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        assert ctx.flight.factors is not None, "the layer's own node comes before"
        (outputs, inputs), ctx.flight.factors = ctx.flight.factors, None
        return outputs.t().matmul(inputs), None


class _First(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, flight: _Flight) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.flight, ctx.has_bias = flight, bias is not None
        return torch.nn.functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        inputs, weight = ctx.saved_tensors
        to_weight = to_bias = None
        to_inputs = grad.matmul(weight) if ctx.needs_input_grad[0] else None
        flat = grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[1]:
            ctx.flight.factors = flat, inputs.reshape(-1, inputs.shape[-1])
            to_weight = grad.new_zeros(()).expand(weight.shape)  # in its place; `_Late` has the gradient
        if ctx.has_bias and ctx.needs_input_grad[2]:
            to_bias = flat.sum(0)
        return to_inputs, to_weight, to_bias, None


class Uncopied:
    """Something that refers to process groups, which a copy of a module shares."""

    def __deepcopy__(self, _: Any) -> Any:
        return self


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
        flight = _Flight(self._axis)
        arrived = _Arrive.apply(inputs, flight)  # type: ignore[no-untyped-call]
        _, weight, bias = _cast(inputs, weight, bias)
        late = _Late.apply(weight, flight)  # type: ignore[no-untyped-call]
        entered = self._remember(inputs, _Depart.apply(arrived, flight))  # type: ignore[no-untyped-call]
        return _First.apply(entered.to(late.dtype), late, bias, flight)  # type: ignore[no-any-return,no-untyped-call]


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
