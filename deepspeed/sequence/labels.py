"""Labels over sequences that are shared out, and the loss over all of their tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed import comm

__all__ = ["IGNORED", "mean_over_tokens", "shifted", "sum_over_ranks"]

IGNORED = -100


def shifted(labels: Tensor, none: int = IGNORED) -> Tensor:
    """For every token the label of the next one, [batch, length]; the last one has none."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=none)


def mean_over_tokens(loss: Tensor, labels: Tensor, group: ProcessGroup, worth: int) -> Tensor:
    """The mean over all labelled tokens of the group, of each rank's mean over its own; 0 where nobody has any.

    Its gradient is `worth` times that of the mean: the number of ranks if gradients are averaged over them afterwards.
    """
    count = (labels != IGNORED).sum()
    value = torch.where(count > 0, loss.detach(), 0.0).double() * count  # the mean over nothing is nan
    totals = torch.stack([value, count.double()])
    comm.all_reduce(totals, group=group)
    share = count * worth / totals[1].clamp(min=1)
    return _Instead.apply(loss, totals[0] / totals[1].clamp(min=1), share)  # type: ignore[no-any-return, no-untyped-call]


def sum_over_ranks(loss: Tensor, group: ProcessGroup, worth: int) -> Tensor:
    """The sum of the ranks' losses; its gradient is `worth` times that of each, as that of `mean_over_tokens`."""
    total = loss.detach().double()
    comm.all_reduce(total, group=group)
    share = torch.tensor(worth, device=loss.device)
    return _Instead.apply(loss, total, share)  # type: ignore[no-any-return, no-untyped-call]


class _Instead(torch.autograd.Function):
    """Another value, and a gradient that is a share of the original's."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: Tensor, share: Tensor) -> Tensor:
        ctx.save_for_backward(share)
        return value.to(loss.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (share,) = ctx.saved_tensors
        return (grads[0] * share).to(grads[0].dtype), None, None
