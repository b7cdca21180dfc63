"""The batch triangle: train = micro × accumulation × data-parallel ranks, whichever of them are given."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed.config.elasticity import elastic_sizes
from deepspeed.config.schema import Schema
from deepspeed.errors import BatchSizeError

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


@dataclass(frozen=True)
class BatchSizes:
    """The three batch sizes, resolved, and which of them were derived rather than given."""

    train: int
    micro: int
    steps: int
    ranks: int
    derived: frozenset[str] = frozenset()


def resolve(train: int | None, micro: int | None, steps: int | None, ranks: int) -> BatchSizes:
    """Derive what is missing and check that all four numbers fit together."""
    for key, value in ((TRAIN, train), (MICRO, micro), (STEPS, steps)):
        if value is not None and value < 1:
            raise BatchSizeError(f"{key} is {value}; it must be at least 1", path=key)
    if train is None and micro is None:
        raise BatchSizeError(
            f"Either {TRAIN} or {MICRO} needs to be provided"
            + ("." if steps is None else f"; found only {STEPS} = {steps}."),
            path=TRAIN,
        )
    given = {key for key, value in ((TRAIN, train), (MICRO, micro), (STEPS, steps)) if value is not None}
    if train is None:
        assert micro is not None, "one of the two is given, checked above"
        steps = steps or 1
        train = micro * steps * ranks
    elif micro is None:
        steps = steps or 1
        micro = _share(train, ranks, steps, MICRO, STEPS)
    elif steps is None:
        steps = _share(train, ranks, micro, STEPS, MICRO)
    if train != micro * steps * ranks:
        raise BatchSizeError(
            f"{TRAIN} = {MICRO} × {STEPS} × data-parallel ranks does not hold: "
            f"{train} != {micro} * {steps} * {ranks} = {micro * steps * ranks}. "
            f"Change one of them, or give only two and let the third be derived.",
            path=TRAIN,
        )
    return BatchSizes(train, micro, steps, ranks, frozenset({TRAIN, MICRO, STEPS} - given))


def batch_of(schema: Schema, ranks: int) -> BatchSizes:
    """The batch sizes that a config means on so many data-parallel ranks: those of its keys, or elastic ones."""
    if schema.elasticity.enabled:
        return BatchSizes(*elastic_sizes(schema.elasticity, ranks), ranks, frozenset({TRAIN, MICRO, STEPS}))
    return resolve(
        schema.train_batch_size, schema.train_micro_batch_size_per_gpu, schema.gradient_accumulation_steps, ranks
    )


def _share(train: int, ranks: int, other: int, missing: str, other_key: str) -> int:
    """`missing` = train / (ranks × other), which must come out whole and at least 1."""
    part = ranks * other
    if train % part:
        below, above = train // part * part, (train // part + 1) * part
        raise BatchSizeError(
            f"{missing} cannot be derived: {TRAIN} {train} is not divisible by "
            f"{other_key} {other} × {ranks} data-parallel ranks = {part}. "
            f"Use a {TRAIN} of {f'{below} or ' if below else ''}{above}, or another {other_key}.",
            path=TRAIN,
        )
    return train // part
