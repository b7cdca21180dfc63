"""Generators of schedules: GPipe, 1F1B, interleaved 1F1B, ZB-H1, and the forward alone. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from deepspeed.errors import UsageError
from deepspeed.parallel.balance import partition_uniform
from deepspeed.pipe.schedule.actions import Action, Op, Schedule

__all__ = ["forward_only", "gpipe", "interleaved", "looped", "one_f_one_b", "require_sizes", "zb_h1"]

_F, _B, _I, _W = Op.FORWARD, Op.BACKWARD, Op.INPUT, Op.WEIGHT


def require_sizes(name: str, ranks: int, micro_batches: int, *, least: int = 1, chunks: int = 1) -> None:
    """Refuse numbers that no schedule of this name has."""
    if ranks < 1 or chunks < 1:
        raise UsageError(f"schedule {name!r}: found {ranks} ranks with {chunks} stages each; each is at least 1")
    if micro_batches < least:
        raise UsageError(
            f"schedule {name!r} on {ranks} pipeline ranks needs at least {least} micro-batches; found {micro_batches}. "
            "Raise gradient_accumulation_steps, or choose another schedule."
        )


def looped(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stage → rank where stages go round the ranks: 0, 1, …, 0, 1, …."""
    return tuple(stage % ranks for stage in range(ranks * chunks))


def _plain(
    name: str, micro_batches: int, actions: Sequence[Iterable[Action]], limits: Iterable[int], *, only: bool = False
) -> Schedule:
    """A schedule in which every rank holds one stage."""
    owners = tuple(range(len(actions)))
    return Schedule(name, micro_batches, owners, tuple(map(tuple, actions)), tuple(limits), only)


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards, last micro-batch first: its activations are the newest."""
    require_sizes("gpipe", ranks, micro_batches)
    actions = [
        [Action(_F, rank, mb) for mb in range(micro_batches)]
        + [Action(_B, rank, mb) for mb in reversed(range(micro_batches))]
        for rank in range(ranks)
    ]
    return _plain("gpipe", micro_batches, actions, [micro_batches] * ranks)


def forward_only(ranks: int, micro_batches: int, owners: tuple[int, ...] | None = None) -> Schedule:
    """The forward of every micro-batch through the stages of `owners`; nothing is kept for a backward."""
    require_sizes("forward", ranks, micro_batches)
    places = owners or tuple(range(ranks))
    actions = tuple(
        tuple(Action(_F, stage, mb) for mb, stage in _waves(places, rank, micro_batches)) for rank in range(ranks)
    )
    return Schedule("forward", micro_batches, places, actions, (0,) * ranks, forward_only=True)


def _waves(owners: tuple[int, ...], rank: int, micro_batches: int) -> list[tuple[int, int]]:
    """(micro-batch, stage) in the order in which inputs come if micro-batches follow each other at once."""
    mine = [stage for stage, owner in enumerate(owners) if owner == rank]
    pairs = [(mb, stage) for mb in range(micro_batches) for stage in mine]
    return sorted(pairs, key=lambda pair: (pair[0] + pair[1], -pair[1]))


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """Forwards until the pipeline is full, then one backward after each forward."""
    require_sizes("1f1b", ranks, micro_batches)
    limits = [min(ranks - rank, micro_batches) for rank in range(ranks)]
    actions = [list(_one_and_one(rank, micro_batches, limits[rank] - 1)) for rank in range(ranks)]
    return _plain("1f1b", micro_batches, actions, limits)


def _one_and_one(stage: int, micro_batches: int, ahead: int) -> Iterator[Action]:
    for mb in range(micro_batches + ahead):
        if mb < micro_batches:
            yield Action(_F, stage, mb)
        if mb >= ahead:
            yield Action(_B, stage, mb - ahead)


def zb_h1(ranks: int, micro_batches: int) -> Schedule:
    """1F1B whose backward is split: weights' gradients wait and fill the time at the end.

    Rank r lets r of them wait, so that no rank holds more than the first rank of 1F1B does.
    """
    require_sizes("zb-h1", ranks, micro_batches)
    actions = [list(_delayed(rank, micro_batches, min(ranks - rank, micro_batches) - 1)) for rank in range(ranks)]
    return _plain("zb-h1", micro_batches, actions, [min(ranks, micro_batches)] * ranks)


def _delayed(stage: int, micro_batches: int, ahead: int) -> Iterator[Action]:
    waiting: list[int] = []
    for action in _one_and_one(stage, micro_batches, ahead):
        if action.op is _F:
            yield action
            continue
        yield Action(_I, stage, action.micro_batch)
        waiting.append(action.micro_batch)
        if len(waiting) > stage:
            yield Action(_W, stage, waiting.pop(0))
    for mb in waiting:
        yield Action(_W, stage, mb)


def interleaved(ranks: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """1F1B over several stages per rank, in groups of at least as many micro-batches as there are ranks.

    The bubble is that of 1F1B divided by the number of stages on a rank, for as many times the messages.
    """
    require_sizes("interleaved", ranks, micro_batches, chunks=chunks)
    total = micro_batches * chunks
    groups = _groups(ranks, micro_batches)
    rows, limits = [], []
    for rank in range(ranks):
        warmup = min(total, 2 * (ranks - rank - 1) + (chunks - 1) * len(groups[0]))
        mine = [chunk * ranks + rank for chunk in range(chunks)]
        forwards = [Action(_F, stage, mb) for group in groups for stage in mine for mb in group]
        backwards = [Action(_B, stage, mb) for group in groups for stage in reversed(mine) for mb in group]
        rows.append(tuple(_merge(forwards, backwards, warmup)))
        limits.append(min(total, warmup + 1))
    return Schedule("interleaved", micro_batches, looped(ranks, chunks), tuple(rows), tuple(limits))


def _groups(ranks: int, micro_batches: int) -> list[range]:
    """Micro-batches that go through all stages together: the larger groups first, none below the number of ranks.

    A smaller one would come round before the gradients that make room for it.
    """
    count = max(1, micro_batches // ranks)
    bounds = partition_uniform(micro_batches, count)
    return [range(first, last) for first, last in pairwise(bounds)]


def _merge(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> Iterator[Action]:
    yield from forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - warmup :]
