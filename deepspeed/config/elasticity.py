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
from typing import Annotated, Any, ClassVar

from annotated_types import MinLen
from pydantic import BeforeValidator, ValidationError, model_validator

from deepspeed.errors import ElasticityConfigError, ElasticityIncompatibleWorldSize

from .model import Count, NoEffect, PositiveCount, Section, key, raise_together

_VERSIONS = (0.1, 0.2)


def _version(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number not in _VERSIONS:
        raise ValueError(f"expected elasticity version 0.1 or 0.2, found {value!r}")
    return float(number)


class ElasticityConfig(Section):
    """Elastic training: the batch size is chosen so that it fits the most world sizes."""

    renamed_under: ClassVar[str | None] = "elasticity"

    enabled: bool = key(False, "Whether the batch sizes are computed from this section and the number of GPUs.")
    max_train_batch_size: PositiveCount = key(
        2000, "Upper bound on train_batch_size, in samples; must be given when enabled."
    )
    micro_batch_sizes: Annotated[list[PositiveCount], MinLen(1)] = key(
        [2, 4, 6], "Micro-batch sizes to choose from, in samples per GPU; must be given when enabled."
    )
    min_gpus: PositiveCount = key(1, "Smallest number of GPUs the job may run on.")
    max_gpus: PositiveCount = key(10_000, "Largest number of GPUs the job may run on.")
    min_time: Count = key(
        0,
        "Minutes that the job needs at least to be worth starting; informational.",
        NoEffect("it is for schedulers, who decide whether a job is worth starting"),
    )
    prefer_larger_batch: bool = key(True, "Whether the larger of two equally good batch sizes is taken.")
    ignore_non_elastic_batch_info: bool = key(
        False, "Whether batch keys elsewhere in the config are ignored rather than refused."
    )
    version: Annotated[float, BeforeValidator(_version)] = key(
        0.2, "Version of the algorithm: 0.1, or 0.2 which knows model parallelism."
    )
    model_parallel_size: PositiveCount = key(
        1, "Number of ranks that hold one copy of the model; above 1 needs version 0.2."
    )
    num_gpus_per_node: PositiveCount = key(1, "Number of GPUs in a node; a multiple of model_parallel_size.")

    @model_validator(mode="after")
    def _rules(self) -> ElasticityConfig:
        if not self.enabled:
            return self
        problems = [
            f"{key} must be given when elasticity is enabled"
            for key in ("max_train_batch_size", "micro_batch_sizes")
            if key not in self.model_fields_set
        ]
        too_large = [size for size in self.micro_batch_sizes if size > self.max_train_batch_size]
        if too_large:
            problems.append(f"micro_batch_sizes {too_large} exceed max_train_batch_size ({self.max_train_batch_size})")
        if self.min_gpus > self.max_gpus:
            problems.append(f"min_gpus ({self.min_gpus}) exceeds max_gpus ({self.max_gpus})")
        if self.model_parallel_size > 1 and self.version < 0.2:
            problems.append(f"model_parallel_size {self.model_parallel_size} needs version 0.2, found {self.version}")
        if self.version >= 0.2 and self.num_gpus_per_node % self.model_parallel_size:
            problems.append(
                f"num_gpus_per_node ({self.num_gpus_per_node}) must be a multiple of model_parallel_size "
                f"({self.model_parallel_size})"
            )
        raise_together(problems)
        return self


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
        said = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}".lstrip(": ") for e in error.errors())
        raise ElasticityConfigError(f"elasticity: {said.replace('Value error, ', '')}", path="elasticity") from error


def check_planned(section: ElasticityConfig, text: str) -> None:
    """End if the section is not the one that a scheduler planned with, which is given as JSON."""
    try:
        planned = elastic_section(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise ElasticityConfigError(f"{PLANNED} is not an elasticity section: {error}", path="elasticity") from error
    for name in _FIXED:
        if getattr(planned, name) != getattr(section, name):
            raise ElasticityConfigError(
                f"elasticity.{name} is {getattr(section, name)}, but the scheduler planned with "
                f"{getattr(planned, name)} ({PLANNED}); use the same section",
                path=f"elasticity.{name}",
            )
