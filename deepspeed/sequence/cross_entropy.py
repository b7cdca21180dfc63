"""Cross-entropy where ranks share the vocabulary (`tp_group`), the sequence (`sp_group`), or both.

Parts of a vocabulary are the last dim of the logits, parts of a sequence the first dim of the targets.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.parallel.regions import GroupMembers, between, joined, leave, own, split_cross_entropy, summed_part


def _columns(
    width: int, group: ProcessGroup | None, start: int | None, stop: int | None, size: int | None
) -> tuple[int, int]:
    """(the first token that a rank's logits are for, tokens in all): by default equal parts in the order of ranks."""
    if (start is None) != (stop is None):
        raise UsageError(f"vocab_start_index is {start} and vocab_end_index is {stop}; give both of them or none.")
    if size is not None and start is None:
        raise UsageError(
            f"global_vocab_size is {size}, which needs explicit vocab_start_index and vocab_end_index: columns beyond "
            "it are padding, and it must be known whose they are."
        )
    if start is None or stop is None:
        return (0, width) if group is None else (group.rank() * width, group.size() * width)
    if stop - start != width:
        raise UsageError(
            f"the logits have {width} columns, but vocab_start_index to vocab_end_index is {start} to {stop}."
        )
    if size is None:
        ends = torch.tensor(stop, device=comm.group_device())
        if group is not None:
            comm.all_reduce(ends, comm.ReduceOp.MAX, group=group)
        size = int(ends)
    return start, size


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    tp_group: ProcessGroup | None = None,
    sp_group: ProcessGroup | None = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    global_vocab_size: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    gather_sequence_loss: bool = False,
    backend: str = "torch",
) -> Tensor:
    """The loss of logits of which the ranks of `tp_group` have some columns each, in float32.

    "mean" and "sum" are over the tokens of all ranks of `sp_group`, the gradient is that of this rank's part. "none"
    gives a loss for every token of this rank, or of all with `gather_sequence_loss`, whose gradients are summed.
    """
    _check(reduction, gather_sequence_loss, backend)
    width = vocab_parallel_logits.shape[-1]
    start, size = _columns(width, tp_group, vocab_start_index, vocab_end_index, global_vocab_size)
    strange = (target != ignore_index) & ((target < 0) | (target >= size))
    if bool(strange.any()):
        raise UsageError(
            f"a target is {int(target[strange][0])}, out of range for a vocabulary of {size} tokens; tokens that are "
            f"not to be counted have the target {ignore_index} (ignore_index)."
        )
    logits = vocab_parallel_logits
    if start + width > size:
        padding = torch.arange(width, device=logits.device) >= max(0, size - start)
        logits = logits.masked_fill(padding, -torch.inf)
    losses = split_cross_entropy(logits, target, start, tp_group, ignore_index)
    if reduction == "none":
        return _gathered(losses, sp_group, sums=True) if gather_sequence_loss and sp_group is not None else losses
    return _over_tokens(losses, target != ignore_index, sp_group, mean=reduction == "mean")


def vocab_sequence_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    sp_group: ProcessGroup,
    tp_group: ProcessGroup | None = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    ignore_index: int = -100,
    reduction: str = "none",
    gather_sequence_loss: bool = True,
    backend: str = "torch",
) -> Tensor:
    """`vocab_parallel_cross_entropy` with other defaults; of gathered losses the gradient is this rank's part."""
    gathers = gather_sequence_loss and reduction == "none"
    _check(reduction, gather_sequence_loss, backend)
    losses = vocab_parallel_cross_entropy(
        vocab_parallel_logits,
        target,
        tp_group,
        sp_group,
        vocab_start_index,
        vocab_end_index,
        ignore_index=ignore_index,
        reduction=reduction,
    )
    return _gathered(losses, sp_group, sums=False) if gathers else losses


class VocabParallelCrossEntropyLoss(nn.Module):
    """`vocab_parallel_cross_entropy` as a module."""

    def __init__(
        self,
        tp_group: ProcessGroup | None = None,
        sp_group: ProcessGroup | None = None,
        vocab_start_index: int | None = None,
        vocab_end_index: int | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        gather_sequence_loss: bool = False,
        backend: str = "torch",
    ) -> None:
        super().__init__()
        _check(reduction, gather_sequence_loss, backend)
        self.reduction, self.gather_sequence_loss = reduction, gather_sequence_loss
        self.options: dict[str, Any] = {
            "tp_group": tp_group,
            "sp_group": sp_group,
            "vocab_start_index": vocab_start_index,
            "vocab_end_index": vocab_end_index,
            "ignore_index": ignore_index,
            "backend": backend,
        }

    def forward(self, vocab_parallel_logits: Tensor, target: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(
            vocab_parallel_logits,
            target,
            reduction=self.reduction,
            gather_sequence_loss=self.gather_sequence_loss,
            **self.options,
        )


def _over_tokens(losses: Tensor, counted: Tensor, group: ProcessGroup | None, *, mean: bool) -> Tensor:
    """The sum of losses over the tokens of all ranks, or their mean over those that are `counted`."""
    totals = torch.stack([losses.sum(), counted.sum().to(losses.dtype)])
    if group is not None:
        totals = leave(totals, GroupMembers(group))  # the gradient is that of this rank's summand alone
    return totals[0] / totals[1] if mean else totals[0]


def _gathered(losses: Tensor, group: ProcessGroup, *, sums: bool) -> Tensor:
    """All ranks' losses, one after the other; the gradient is this rank's part, of the sum over ranks if `sums`."""
    sizes = [losses.shape[0]] * group.size()
    return between(losses, GroupMembers(group), sizes, 0, (joined, summed_part if sums else own))


def _check(reduction: str, gathers: bool, backend: str) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise UsageError(f"reduction is {reduction!r}; expected 'mean', 'sum' or 'none'.")
    if gathers and reduction != "none":
        raise UsageError(f"gather_sequence_loss needs reduction 'none', found {reduction!r}: one number has no parts.")
    if backend != "torch":
        raise UsageError(f"backend is {backend!r}; the loss over a split vocabulary is computed by 'torch' alone.")
