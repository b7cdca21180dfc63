"""Elastic batch sizes: the one batch size that fits the most numbers of GPUs, and its parts on so many ranks.

A batch B runs on g ranks if some micro-batch size m divides B / g. Batches with many divisors fit many g, so candidates
are multiples of micro-batch sizes by highly composite numbers, those with more divisors than any smaller one.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from deepspeed.config.elasticity import ElasticityConfig
from deepspeed.errors import ElasticityConfigError, ElasticityIncompatibleWorldSize

__all__ = [
    "PLANNED",
    "ElasticBatch",
    "best_candidate",
    "candidate_batch_sizes",
    "check_planned",
    "elastic_batch",
    "elastic_section",
    "elastic_sizes",
    "largest_micro",
    "valid_gpus",
]

PLANNED = "DEEPSPEED_ELASTICITY_CONFIG"  # the section that a scheduler planned with, as JSON
_FIXED = ("max_train_batch_size", "micro_batch_sizes", "version")

_HIGHLY_COMPOSITE = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160),
    *(25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720),
)


@dataclass(frozen=True, slots=True)
class ElasticBatch:
    """A batch size, and the numbers of data-parallel ranks that it runs on, ascending."""

    train: int
    valid: tuple[int, ...]


def candidate_batch_sizes(bases: Iterable[int], most: int) -> list[int]:
    """For each base the largest multiple by a highly composite number that is at most `most`."""
    found = {
        base if base == most else base * _HIGHLY_COMPOSITE[bisect_right(_HIGHLY_COMPOSITE, most // base) - 1]
        for base in bases
        if base <= most
    }
    return sorted(found)


def valid_gpus(batch: int, micros: Iterable[int], fewest: int, most: int) -> list[int]:
    """The numbers of ranks, from `fewest` to `most`, on which the batch is made of whole micro batches."""
    found: set[int] = set()
    for micro in micros:
        if batch % micro == 0:
            share = batch // micro
            small = [number for number in range(1, math.isqrt(share) + 1) if share % number == 0]
            found.update(number for low in small for number in (low, share // low) if fewest <= number <= most)
    return sorted(found)


def best_candidate(
    candidates: Iterable[int], micros: Sequence[int], fewest: int, most: int, prefer_larger: bool
) -> ElasticBatch | None:
    """The candidate with the most valid numbers of ranks; of equally good ones the larger or the smaller."""
    judged = [ElasticBatch(batch, tuple(valid_gpus(batch, micros, fewest, most))) for batch in candidates]
    sign = 1 if prefer_larger else -1
    return max(
        (each for each in judged if each.valid), key=lambda each: (len(each.valid), sign * each.train), default=None
    )


def _plain(micros: Sequence[int], most: int, gpus: tuple[int, int], prefer_larger: bool) -> ElasticBatch | None:
    """Version 0.1 of the algorithm; `gpus` are the fewest and the most."""
    bases = [*micros, math.lcm(*micros)]
    return best_candidate(candidate_batch_sizes(bases, most), micros, *gpus, prefer_larger)


def elastic_batch(section: ElasticityConfig, gpus: int | None) -> ElasticBatch:
    """The plan of an `elasticity` section; version 0.2 also looks at the number of GPUs there are now, if known."""
    micros, most, larger = section.micro_batch_sizes, section.max_train_batch_size, section.prefer_larger_batch
    if section.version < 0.2:
        found = _plain(micros, most, (section.min_gpus, section.max_gpus), larger)
        if found is None:
            raise ElasticityConfigError(
                f"elasticity: no batch of at most {most} samples runs on {section.min_gpus} to {section.max_gpus} GPUs "
                f"in micro batches of {micros}; raise max_train_batch_size or widen min_gpus and max_gpus",
                path="elasticity",
            )
        return found
    per_node, parallel = section.num_gpus_per_node, section.model_parallel_size
    replicas = per_node // parallel  # data-parallel ranks of a node
    nodes = (section.min_gpus // per_node, section.max_gpus // per_node)
    found = _plain(micros, most // replicas, nodes, larger)
    if found is not None:
        found = ElasticBatch(found.train * replicas, tuple(count * replicas for count in found.valid))
        if gpus is None or gpus // parallel in found.valid:
            return found
    if gpus is None:
        gpus = max(section.min_gpus, per_node)
    ranks = gpus * replicas // per_node
    # Not a batch of the list: the largest, or smallest, one that these GPUs can do.
    sizes = [most // (micro * ranks) * micro * ranks for micro in micros] if ranks else []
    sizes = [size for size in sizes if size]
    if not sizes:
        raise ElasticityIncompatibleWorldSize(
            f"elasticity: {gpus} GPUs ({ranks} data-parallel ranks) need a batch of at least "
            f"{min(micros) * max(ranks, 1)} samples, but max_train_batch_size is {most}; raise it or use fewer GPUs",
            path="elasticity.max_train_batch_size",
        )
    return ElasticBatch(max(sizes) if larger else min(sizes), (ranks,))


def largest_micro(batch: ElasticBatch, micros: Iterable[int], ranks: int) -> int:
    """The largest micro-batch size with which the batch runs on so many ranks; an error if it does not."""
    fitting = [micro for micro in micros if batch.train // ranks % micro == 0] if ranks in batch.valid else []
    if not fitting:
        shown = ", ".join(map(str, batch.valid[:20])) + (", …" if len(batch.valid) > 20 else "")
        raise ElasticityIncompatibleWorldSize(
            f"elasticity: a batch of {batch.train} does not run on {ranks} data-parallel ranks; it does on {shown}",
            path="elasticity",
        )
    return max(fitting)


def elastic_sizes(section: ElasticityConfig, ranks: int) -> tuple[int, int, int]:
    """train, micro and accumulation on so many data-parallel ranks; what a scheduler planned with must not change."""
    if PLANNED in os.environ:
        check_planned(section, os.environ[PLANNED])
    batch = elastic_batch(section, ranks * section.model_parallel_size)
    micro = largest_micro(batch, section.micro_batch_sizes, ranks)
    return batch.train, micro, batch.train // (micro * ranks)


def elastic_section(value: Any) -> ElasticityConfig:
    """The section as a checked object."""
    try:
        return ElasticityConfig.model_validate(value)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}".lstrip(": ") for each in error.errors()]
        raise ElasticityConfigError(f"elasticity: {'; '.join(lines)}", path="elasticity") from error


def check_planned(section: ElasticityConfig, text: str) -> None:
    """End if the section is not the one that a scheduler planned with, which is given as JSON."""
    try:
        planned = elastic_section(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise ElasticityConfigError(f"{PLANNED} is not an elasticity section: {error}", path="elasticity") from error
    for key in _FIXED:
        if getattr(planned, key) != getattr(section, key):
            raise ElasticityConfigError(
                f"elasticity.{key} is {getattr(section, key)}, but the scheduler planned with {getattr(planned, key)} "
                f"({PLANNED}); use the same section",
                path=f"elasticity.{key}",
            )
