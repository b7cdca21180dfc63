"""Cross-entropy of logits that are split by vocabulary: three numbers per token go over the wire, never the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed import comm

__all__ = ["split_cross_entropy"]


class _CrossEntropy(torch.autograd.Function):
    """logits [tokens, this rank's vocabulary], target [tokens] → the loss of each token, zero where it is ignored."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, start: int, group: Any, ignore: int) -> Tensor:
        stop = start + logits.shape[-1]
        highest = logits.max(dim=-1).values
        if group is not None:
            comm.all_reduce(highest, op=comm.ReduceOp.MAX, group=group)
        shifted = logits - highest.unsqueeze(-1)
        foreign = (target < start) | (target >= stop)
        place = (target - start).masked_fill(foreign, 0)
        found = shifted.gather(-1, place.unsqueeze(-1)).squeeze(-1)
        exps = shifted.exp_()
        sums = torch.stack([exps.sum(-1), found.masked_fill(foreign, 0)])  # [2, tokens]
        if group is not None:
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
    """The loss of each token, in float32; `start` is the first token of this rank's vocabulary.

    The ranks of `group` have the other parts of the vocabulary; None where this rank has all of it.
    """
    flat = logits.reshape(-1, logits.shape[-1]).float()
    losses = _CrossEntropy.apply(flat, target.reshape(-1), start, group, ignore_index)  # type: ignore[no-untyped-call]
    return losses.view(target.shape)  # type: ignore[no-any-return]
