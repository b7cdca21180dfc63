"""The losses of Transformers' models over logits that are split by vocabulary."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from deepspeed.errors import UsageError
from deepspeed.parallel.split_vocabulary import split_cross_entropy

__all__ = ["causal_lm_loss", "masked_lm_loss", "split_cross_entropy"]


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
