"""Cross-entropy of logits that are split by vocabulary: three numbers per token go over the wire, never the logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed import comm
from deepspeed.errors import UsageError

__all__ = ["causal_lm_loss", "masked_lm_loss", "split_cross_entropy"]


class _CrossEntropy(torch.autograd.Function):
    """logits [tokens, this rank's vocabulary], target [tokens] → the loss of each token, zero where it is ignored."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, start: int, group: Any, ignore: int) -> Tensor:
        stop = start + logits.shape[-1]
        highest = logits.max(dim=-1).values
        comm.all_reduce(highest, op=comm.ReduceOp.MAX, group=group)
        shifted = logits - highest.unsqueeze(-1)
        foreign = (target < start) | (target >= stop)
        place = (target - start).masked_fill(foreign, 0)
        found = shifted.gather(-1, place.unsqueeze(-1)).squeeze(-1)
        exps = shifted.exp_()
        sums = torch.stack([exps.sum(-1), found.masked_fill(foreign, 0)])  # [2, tokens]
        comm.all_reduce(sums, group=group)
        ignored = target == ignore
        ctx.save_for_backward(exps.div_(sums[0].unsqueeze(-1)), place, foreign | ignored, ignored)
        return (sums[0].log() - sums[1]).masked_fill(ignored, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        shares, place, elsewhere, ignored = ctx.saved_tensors
        grad = shares.clone()
        ones = (~elsewhere).to(grad.dtype).neg_().unsqueeze(-1)
        grad.scatter_add_(-1, place.unsqueeze(-1), ones)
        grad.mul_(grads[0].masked_fill(ignored, 0).unsqueeze(-1))
        return grad, None, None, None, None


def split_cross_entropy(logits: Tensor, target: Tensor, start: int, group: Any, ignore_index: int = -100) -> Tensor:
    """The loss of each token, in float32; `start` is the first token of this rank's vocabulary."""
    flat = logits.reshape(-1, logits.shape[-1]).float()
    losses = _CrossEntropy.apply(flat, target.reshape(-1), start, group, ignore_index)  # type: ignore[no-untyped-call]
    return losses.view(target.shape)  # type: ignore[no-any-return]


def _reduced(losses: Tensor, target: Tensor, ignore_index: int, items: Any) -> Tensor:
    if items is None:
        return losses.sum() / (target != ignore_index).sum()
    return losses.sum() / (items.to(losses.device) if isinstance(items, Tensor) else items)


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    *,
    start: int,
    group: Any,
    ignore_index: int = -100,
    num_items_in_batch: Any = None,
    shift_labels: Tensor | None = None,
) -> Tensor:
    """The loss of a causal language model: each token is predicted from those before it."""
    if shift_labels is None:
        if labels is None:
            raise UsageError("the loss of a causal language model needs labels or shift_labels; both are None")
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
    target = shift_labels.to(logits.device)
    losses = split_cross_entropy(logits, target, start, group, ignore_index)
    return _reduced(losses, target, ignore_index, num_items_in_batch)


def masked_lm_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    start: int,
    group: Any,
    ignore_index: int = -100,
    num_items_in_batch: Any = None,
) -> Tensor:
    """The loss of a model that predicts tokens where they stand."""
    target = labels.to(logits.device)
    losses = split_cross_entropy(logits, target, start, group, ignore_index)
    return _reduced(losses, target, ignore_index, num_items_in_batch)
