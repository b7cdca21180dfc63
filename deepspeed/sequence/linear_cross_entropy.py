"""An output layer and its loss in one, where ranks share the vocabulary, the sequence, or both: logits of a chunk."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from deepspeed.errors import UsageError
from deepspeed.parallel.regions import Members, enter
from deepspeed.sequence.cross_entropy import Columns, over_tokens, vocab_parallel_cross_entropy

__all__ = ["vocab_parallel_linear_cross_entropy"]


def vocab_parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    tp_group: ProcessGroup | None = None,
    sp_group: ProcessGroup | None = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk_size: int | None = None,
) -> Tensor:
    """The loss of `hidden` by this rank's rows of an output layer; logits exist for `chunk_size` tokens.

    "mean" and "sum" are over the tokens of all ranks of `sp_group`; "none" gives a loss for each token of this rank.
    The gradient of `hidden` is that of the whole vocabulary.
    """
    if hidden.shape[:-1] != target.shape:
        raise UsageError(
            f"hidden has tokens of shape {tuple(hidden.shape[:-1])}, but target is {tuple(target.shape)}; give each "
            "token a target"
        )
    if chunk_size is not None and chunk_size < 1:
        raise UsageError(f"chunk_size is {chunk_size}; expected a number of tokens from 1, or None for all at once")
    if reduction not in ("mean", "sum", "none"):
        raise UsageError(f"reduction is {reduction!r}; expected 'mean', 'sum' or 'none'.")
    entered = hidden if tp_group is None else enter(hidden, Members(tp_group))
    size = max(1, target.numel() if chunk_size is None else chunk_size)
    columns = Columns.of(weight.shape[0], tp_group, vocab_start_index, vocab_end_index, None)  # ranks tell once

    def losses(some: Tensor, wanted: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(
            F.linear(some, weight, bias),
            wanted,
            tp_group,
            None,
            columns.start,
            columns.stop,
            columns.size,
            ignore_index=ignore_index,
            reduction="none",
        )

    chunks = zip(entered.flatten(0, -2).split(size), target.flatten().split(size), strict=True)
    each = torch.cat([checkpoint(losses, some, wanted, use_reentrant=False) for some, wanted in chunks])
    if reduction == "none":
        return each.view(target.shape)
    return over_tokens(each, target != ignore_index, sp_group, mean=reduction == "mean")
