"""Matrix products of many groups of rows at once, each with a matrix of its own: ops `grouped_rows`, `grouped_pairs`.

groups = Groups.of(counts)              rows 0 … counts[0] are the first group, and so on
grouped_linear(rows, weight, groups)    [rows, in] × [groups, out, in] → [rows, out]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from deepspeed.ops.capability import compute_capability, on_cuda
from deepspeed.ops.registry import implements, op, reference

_ALIGNED = 16  # bytes: what the kernels of torch ask of rows


@dataclass(frozen=True)
class Groups:
    """Which rows belong together: groups of one `length`, or groups that end at `ends`."""

    count: int
    length: int | None = None
    ends: Tensor | None = None
    """[count], int32, on the device of the rows: the host does not know them."""

    @classmethod
    def of(cls, counts: Tensor) -> Groups:
        """Groups of so many rows each, which stay on the device."""
        return cls(counts.numel(), ends=counts.cumsum(0).to(torch.int32))

    def counts(self) -> Tensor:
        """[count]: rows of each group, on the device."""
        assert self.ends is not None, "equal groups are known to the host"
        return torch.diff(self.ends, prepend=self.ends.new_zeros(1))

    def sizes(self) -> list[int]:
        """Rows of each group; the host waits for the device."""
        if self.ends is None:
            return [self.length or 0] * self.count
        ends = self.ends.tolist()
        return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    def numbers(self, rows: int) -> Tensor:
        """[rows]: the group of each row, where the groups are of different lengths."""
        assert self.ends is not None, "equal groups need no numbers"
        places = torch.arange(rows, device=self.ends.device, dtype=torch.int32)
        return torch.searchsorted(self.ends, places, right=True).clamp_(max=self.count - 1)


def grouped_linear(rows: Tensor, weight: Tensor, groups: Groups, bias: Tensor | None = None) -> Tensor:
    """[rows, out]: each group times the transpose of its weight [groups, out, in], plus its bias [groups, out].

    Under autocast in its dtype, as torch's linear layers are.
    """
    if torch.is_autocast_enabled(rows.device.type):
        dtype = torch.get_autocast_dtype(rows.device.type)
        rows, weight = rows.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if groups.ends is None:
        out: Tensor = _EqualLinear.apply(rows.view(groups.count, -1, rows.shape[-1]), weight, bias)  # type: ignore[no-untyped-call]
        return out.view(-1, weight.shape[1])
    product: Tensor = _GroupedLinear.apply(rows, weight, bias, groups)  # type: ignore[no-untyped-call]
    return product


class _EqualLinear(torch.autograd.Function):
    """Groups of one length [groups, rows, in]; the gradient of a weight lies as the weight does.

    torch's own is that of the turned weight, turned back: whoever adds it to another walks across memory.
    """

    @staticmethod
    def forward(ctx: Any, batch: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(batch, weight)
        turned = weight.transpose(1, 2)
        if bias is None:
            return torch.bmm(batch, turned)
        if batch.device.type == "cpu":  # there torch copies the bias into all rows first: half as long again
            return torch.bmm(batch, turned).add_(bias.unsqueeze(1))
        return torch.baddbmm(bias.unsqueeze(1), batch, turned)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        batch, weight = ctx.saved_tensors
        to_rows = torch.bmm(grads[0], weight) if ctx.needs_input_grad[0] else None
        to_weight = torch.bmm(grads[0].transpose(1, 2), batch) if ctx.needs_input_grad[1] else None
        return to_rows, to_weight, grads[0].sum(1) if ctx.needs_input_grad[2] else None


class _GroupedLinear(torch.autograd.Function):
    """Three products of the same kind, forward and backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups) -> Tensor:
        assert groups.ends is not None, "equal groups have a product of their own"
        ctx.groups = groups
        ctx.save_for_backward(rows, weight, groups.ends)
        product: Tensor = op("grouped_rows")(rows, weight.transpose(1, 2), groups.ends)
        return product if bias is None else _add_to_groups(product, bias, groups)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        rows, weight, ends = ctx.saved_tensors
        grad = grads[0].contiguous()
        to_rows = op("grouped_rows")(grad, weight, ends) if ctx.needs_input_grad[0] else None
        to_weight = op("grouped_pairs")(grad, rows, ends) if ctx.needs_input_grad[1] else None
        return to_rows, to_weight, _sums_of_groups(grad, ctx.groups) if ctx.needs_input_grad[2] else None, None


def _add_to_groups(rows: Tensor, bias: Tensor, groups: Groups) -> Tensor:
    """The rows, to each of which the bias of its group has been added."""
    if rows.device.type != "cpu":
        return rows.add_(bias.index_select(0, groups.numbers(len(rows))))
    for part, each in zip(_parts(rows, groups), bias.unbind(), strict=True):
        part.add_(each)
    return rows


def _sums_of_groups(rows: Tensor, groups: Groups) -> Tensor:
    """[groups, columns]."""
    if rows.device.type != "cpu":
        return rows.new_zeros(groups.count, rows.shape[1]).index_add_(0, groups.numbers(len(rows)), rows)
    return torch.stack([part.sum(0) for part in _parts(rows, groups)])


def _parts(rows: Tensor, groups: Groups) -> tuple[Tensor, ...]:
    """The rows of each group; those behind the last belong to it, as `Groups.numbers` has it."""
    sizes = groups.sizes()
    sizes[-1] += len(rows) - sum(sizes)
    parts: tuple[Tensor, ...] = rows.split(sizes)
    return parts


@reference("grouped_rows")
def rows_by_slices(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """[rows, out]: group by group; `matrices` is [groups, in, out]. Rows behind the last group are 0."""
    out = rows.new_empty(len(rows), matrices.shape[2])
    start = 0
    for matrix, end in zip(matrices.unbind(), ends.tolist(), strict=True):
        torch.mm(rows[start:end], matrix, out=out[start:end])
        start = end
    out[start:].zero_()
    return out


@reference("grouped_pairs")
def pairs_by_slices(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """[groups, left columns, right columns]: the product of each group's rows with each other."""
    out = left.new_empty(len(ends), left.shape[1], right.shape[1])
    start = 0
    for each, end in zip(out.unbind(), ends.tolist(), strict=True):
        torch.mm(left[start:end].t(), right[start:end], out=each)
        start = end
    return out


@implements("grouped_rows", name="torch", requires=on_cuda & compute_capability(8), rank=20)
def rows_at_once(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """As `rows_by_slices`, in one launch."""
    return _product(rows, matrices, ends) if _takes(rows, matrices) else rows_by_slices(rows, matrices, ends)


@implements("grouped_pairs", name="torch", requires=on_cuda & compute_capability(8), rank=20)
def pairs_at_once(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """As `pairs_by_slices`, in one launch."""
    return _product(left.t(), right, ends) if _takes(left, right) else pairs_by_slices(left, right, ends)


def _product(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    product: Callable[..., Tensor] = getattr(functional, "grouped_mm", torch._grouped_mm)  # public from torch 2.10 on
    return product(left, right, offs=ends)


def _takes(*operands: Tensor) -> bool:
    """True if torch's kernel takes these: bfloat16, every row of whole 16 bytes."""
    for each in operands:
        steps = [step * each.element_size() for step in each.stride() if step != 1]
        if each.dtype != torch.bfloat16 or 1 not in each.stride()[-2:] or any(step % _ALIGNED for step in steps):
            return False
    return True
