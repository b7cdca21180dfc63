"""The gradient norm of the whole model, put together from what each rank holds, and clipping by it.

Where nothing depends on a norm a step does not wait for it, and most norms are never read. Their reductions must be
completed all the same: a failed one is reported, and a rank that ended in the middle of one would look lost to others.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.comm import Pending
from deepspeed.comm.operations import ReduceOp
from deepspeed.errors import CommError
from deepspeed.log import logger
from deepspeed.ops.multi_tensor import global_norm, sum_of_squares
from deepspeed.parallel import AxisGroup
from deepspeed.zero.placement import LiesOn, Placement

Squares = tuple[Tensor | None, Tensor | None]
"""The sums of squares of shared gradients and of parts of split ones; None where there are none."""

_EPSILON = 1e-6  # what torch.nn.utils.clip_grad_norm_ adds, so that both clip alike


@dataclass(frozen=True)
class NormRanks:
    """Over which ranks the gradients of a model lie."""

    axis: AxisGroup
    """Those that hold shards or copies of the same parameters."""
    model_group: Any
    """Over which parts of split parameters lie; None if there are no such parts."""
    is_split: Callable[[nn.Parameter], bool]
    all_used: bool
    """A trained parameter without any gradient is an error."""
    stages: Any = None
    """The group over which stages lie, each with parameters of its own; None if all ranks have the same ones."""
    elsewhere: frozenset[int] = frozenset()
    """Ids of parameters of which another stage has an equal copy and counts it."""

    lies_on: LiesOn | None = None
    """The part of these ranks on which a parameter lies; None: all parameters lie on all of them."""
    local: Callable[[], bool] = lambda: False
    """Whether gradients are those of each rank alone, whose norm is not finite if that of another one is not."""

    @property
    def alone(self) -> bool:
        """True if a rank sees all gradients."""
        return self.model_group is None and self.stages is None

    def ranks_of(self, param: Tensor) -> AxisGroup:
        """The ranks that hold the same elements of a parameter, whole or in shards."""
        return self.axis if self.lies_on is None else self.lies_on(param)


NormTerms = tuple[Placement, Sequence[Tensor], Sequence[Tensor]]
"""Gradients of one placement that lie on this rank.

First those of parameters that every rank of the model group has alike, then those of which each has a part.
"""


def total_norm(lines: Sequence[NormTerms], measure: NormRanks, device: torch.device) -> Pending[Tensor]:
    """The L2 norm of all gradients: a small all-reduce of squares, which whoever asks for the norm waits for.

    In float64, so that it hardly depends on how gradients are cut; on a single rank as torch computes it.
    """
    if measure.axis.size == 1 and measure.alone:
        return Pending(global_norm(_dense([tensor for _, shared, _ in lines for tensor in shared])).to(device))
    found = [(placement, (_squares(shared), _squares(split))) for placement, shared, split in lines]
    return joint_norm(found, measure, device)


def joint_norm(found: Sequence[tuple[Placement, Squares]], measure: NormRanks, device: torch.device) -> Pending[Tensor]:
    """As `total_norm`, of what was summed before for each placement."""
    alike = measure.local() or all(_everywhere(placement, measure.axis) for placement, _ in found)
    squares = torch.zeros(2, dtype=torch.float64, device=device)
    for placement, kinds in found:
        weight = 1.0 if alike else 1.0 / placement.copies
        for kind, summed in enumerate(kinds):
            if summed is None:
                continue
            squares[kind].add_(summed.to(device), alpha=weight)
    sums: list[tuple[str, Tensor, Any]] = [] if alike else [("gradient norm", squares, measure.axis.group)]
    if measure.model_group is not None:
        sums.append(("gradient norm of split parameters", squares[1:], measure.model_group))
    if measure.stages is not None:
        sums.append(("gradient norm over stages", squares, measure.stages))
    work = None
    for label, part, group in sums:
        if work is not None:  # each sums what the one before has summed
            work.wait()
        with comm.labelled(label):
            work = comm.all_reduce(part, group=group, async_op=True)
    whole = Pending(squares, work, lambda summed: summed.sum().sqrt().float())
    return _finite_everywhere(whole.wait(), measure) if measure.local() else whole


def _finite_everywhere(norm: Tensor, measure: NormRanks) -> Pending[Tensor]:
    """This rank's norm; infinite if that of any rank is not finite, so that all of them skip the step."""
    flaw = (~torch.isfinite(norm)).to(torch.int32)
    with comm.labelled("whether all gradients are finite"):
        work = comm.all_reduce(flaw, op=ReduceOp.MAX, group=measure.axis.group, async_op=True)
    return Pending(flaw, work, lambda flawed: torch.where(flawed > 0, torch.full_like(norm, torch.inf), norm))


def _squares(tensors: Sequence[Tensor]) -> Tensor | None:
    return sum_of_squares(_dense(tensors)) if tensors else None


def _everywhere(placement: Placement, axis: AxisGroup) -> bool:
    """True if every rank of the axis has the same elements, and no other rank has."""
    copies = placement.shard.ranks if placement.replicate is None else placement.replicate.ranks
    return placement.shard.size == 1 and copies == axis.ranks


def clip_coefficient(norm: Tensor, limit: float) -> Tensor:
    """What gradients of this norm are multiplied by so that their norm is at most `limit`."""
    return torch.clamp(limit / (norm + _EPSILON), max=1.0)


def _dense(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Sparse gradients count by their values, once their duplicates are summed."""
    return [grad.coalesce().values() if grad.is_sparse else grad for grad in gradients]


_AT_THE_END = timedelta(seconds=10)  # for ranks that are behind; a process whose peers are stuck must end, too


class PendingNorm:
    """Keeps the norm that is being found until it is complete."""

    def __init__(self) -> None:
        self._kept: list[Pending[Tensor]] = []
        self._end = weakref.finalize(self, _end, os.getpid(), self._kept)

    @property
    def last(self) -> Pending[Tensor] | None:
        """The norm of the last step; None before the first."""
        return self._kept[-1] if self._kept else None

    def begun(self, norm: Pending[Tensor]) -> None:
        """The reduction of a norm has begun; that of the one before is complete."""
        self._kept[:] = [norm]

    def complete(self) -> None:
        """Wait for the last norm; an error says which reduction failed."""
        if self._kept:
            self._kept[-1].wait()

    def close(self) -> None:
        """As `complete`, for good: a failure is only logged, since nothing asks any more."""
        self._end()


def _end(process: int, kept: list[Pending[Tensor]]) -> None:
    last = kept.pop() if kept else None
    if last is None or os.getpid() != process:  # a fork has not begun it
        return
    try:
        last.wait(_AT_THE_END)
    except CommError as error:
        logger.warning("the norm of the last step's gradients was not found: %s", error)
