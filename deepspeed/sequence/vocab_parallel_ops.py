"""Entropy, divergence and log-probabilities of logits of which each rank of a group has some columns.

Results are in float32, one number per token, the same on all ranks; a gradient is that of this rank's columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed import comm
from deepspeed.sequence.cross_entropy import sum_of_all, vocab_parallel_cross_entropy

__all__ = ["vocab_parallel_entropy", "vocab_parallel_kl_div", "vocab_parallel_logprobs"]


def vocab_parallel_entropy(vocab_parallel_logits: Tensor, tp_group: ProcessGroup | None = None) -> Tensor:
    """The entropy of each token's distribution."""
    logs = _log_softmax(vocab_parallel_logits, tp_group)
    return -_summed((logs.exp() * logs).sum(-1), tp_group)


def vocab_parallel_kl_div(
    student_logits: Tensor, teacher_logits: Tensor, reverse: bool = False, tp_group: ProcessGroup | None = None
) -> Tensor:
    """How far the student is from the teacher, KL(teacher ‖ student); with `reverse` KL(student ‖ teacher)."""
    student, teacher = _log_softmax(student_logits, tp_group), _log_softmax(teacher_logits, tp_group)
    first, second = (student, teacher) if reverse else (teacher, student)
    return _summed((first.exp() * (first - second)).sum(-1), tp_group)


def vocab_parallel_logprobs(
    vocab_parallel_logits: Tensor,
    index: Tensor,
    tp_group: ProcessGroup | None = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    global_vocab_size: int | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """The log-probability of one token of the vocabulary for each; 0 where that is `ignore_index`."""
    return -vocab_parallel_cross_entropy(
        vocab_parallel_logits,
        index,
        tp_group,
        vocab_start_index=vocab_start_index,
        vocab_end_index=vocab_end_index,
        global_vocab_size=global_vocab_size,
        ignore_index=ignore_index,
        reduction="none",
    )


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: ProcessGroup | None) -> Tensor:
        highest = logits.max(-1, keepdim=True).values
        if group is not None:
            comm.all_reduce(highest, comm.ReduceOp.MAX, group=group)
        total = (logits - highest).exp().sum(-1, keepdim=True)
        if group is not None:
            comm.all_reduce(total, group=group)
        logs = logits - highest - total.log()
        ctx.group = group
        ctx.save_for_backward(logs)
        return logs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (logs,) = ctx.saved_tensors
        flow = grads[0].sum(-1, keepdim=True)
        if ctx.group is not None:
            comm.all_reduce(flow, group=ctx.group)
        return grads[0] - logs.exp() * flow, None


def _log_softmax(logits: Tensor, group: ProcessGroup | None) -> Tensor:
    return _LogSoftmax.apply(logits.float(), group)  # type: ignore[no-any-return, no-untyped-call]


def _summed(values: Tensor, group: ProcessGroup | None) -> Tensor:
    return values if group is None else sum_of_all(values, group)
