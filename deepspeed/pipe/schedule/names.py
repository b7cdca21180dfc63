"""The schedules by the names that a config gives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepspeed.errors import UsageError
from deepspeed.pipe.schedule.actions import Schedule
from deepspeed.pipe.schedule.generators import gpipe, interleaved, looped, one_f_one_b, zb_h1
from deepspeed.pipe.schedule.v_shaped import dual_pipe_v, folded, zbv
from deepspeed.pipe.schedule.validate import validate

__all__ = ["SCHEDULES", "Kind", "kind_of", "make"]


@dataclass(frozen=True)
class Kind:
    """A schedule that can be chosen."""

    make: Callable[..., Schedule]
    owners: Callable[[int, int], tuple[int, ...]]
    """(ranks, stages on each) → stage → rank."""
    chunks: int = 1
    """Stages on each rank, unless the config says otherwise."""
    chosen: bool = False
    """The config may say otherwise."""


def _straight(ranks: int, chunks: int) -> tuple[int, ...]:
    return tuple(range(ranks))


def _folded(ranks: int, chunks: int) -> tuple[int, ...]:
    return folded(ranks)


SCHEDULES: dict[str, Kind] = {
    "gpipe": Kind(gpipe, _straight),
    "1f1b": Kind(one_f_one_b, _straight),
    "interleaved": Kind(interleaved, looped, chunks=2, chosen=True),
    "zb-h1": Kind(zb_h1, _straight),
    "zbv": Kind(zbv, _folded, chunks=2),
    "dualpipev": Kind(dual_pipe_v, _folded, chunks=2),
}


def kind_of(name: str) -> Kind:
    """The schedule of a name; an error that lists them if there is none."""
    if name not in SCHEDULES:
        raise UsageError(f"there is no schedule {name!r}; expected one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def make(name: str, ranks: int, micro_batches: int, chunks: int | None = None) -> Schedule:
    """A schedule by its name, validated."""
    kind = kind_of(name)
    if kind.chosen:
        return validate(kind.make(ranks, micro_batches, kind.chunks if chunks is None else chunks))
    if chunks not in (None, kind.chunks):
        raise UsageError(f"schedule {name!r} puts {kind.chunks} stages on each rank; found {chunks}")
    return validate(kind.make(ranks, micro_batches))
