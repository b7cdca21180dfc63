"""Changes of a config that save memory of a device: what a plan tries, and what the error of a full device names.

None changes the samples of a step. They come from what costs nothing to what costs time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed.config.batch import MICRO, STEPS

ZERO, OPTIMIZER, PARAMETERS = "zero_optimization", "offload_optimizer", "offload_param"
SMALL_BUCKET = 50_000_000
"""Elements."""
CHECKPOINTING = "model.gradient_checkpointing_enable()"


@dataclass(frozen=True, slots=True)
class JobSizes:
    """What decides which changes a job has left."""

    micro: int
    """Samples of a micro batch."""
    steps: int
    """Micro batches of a step."""
    replicas: int
    """Ranks that could share states."""
    stage: int
    bucket: int = 0
    """Elements of a bucket of gradients."""
    states_away: float = 0.0
    """The part of the optimizer's states that is not on the device."""
    parameters_away: bool = False
    pipeline: int = 1
    """Stages of the pipeline."""
    recomputes: bool = False
    """Whether activations are computed again, or the model cannot do that."""


@dataclass(frozen=True, slots=True)
class Saving:
    """Keys of the config with their new values, or a line of the script in place of them."""

    keys: Mapping[str, Any]
    code: str = ""

    def __str__(self) -> str:
        return f"{self.code} in the script" if self.code else json.dumps(self.keys)[1:-1]


def savings(sizes: JobSizes) -> Iterator[Saving]:
    """One change each."""
    for parts in (each for each in range(2, sizes.micro + 1) if sizes.micro % each == 0):
        yield Saving({MICRO: sizes.micro // parts, STEPS: sizes.steps * parts})
    if sizes.pipeline > 1:
        for interval in (4, 1):
            yield Saving({"pipeline": {"activation_checkpoint_interval": interval}})
    elif not sizes.recomputes:
        yield Saving({}, CHECKPOINTING)
    if sizes.replicas > 1:
        yield from (Saving({ZERO: {"stage": stage}}) for stage in range(sizes.stage + 1, 4))
    if sizes.stage and sizes.bucket > SMALL_BUCKET:
        yield Saving({ZERO: _small_buckets(sizes.stage)})
    for ratio in (0.5, 1.0) if sizes.stage == 3 else (1.0,):  # below stage 3 states are not cut
        if ratio > sizes.states_away:
            yield Saving(
                {ZERO: {**({} if sizes.stage else {"stage": 1}), OPTIMIZER: {"device": "cpu", "ratio": ratio}}}
            )
    if sizes.stage == 3 and not sizes.parameters_away:
        yield Saving({ZERO: {PARAMETERS: {"device": "cpu"}}})


def all_savings(sizes: JobSizes) -> Iterator[Mapping[str, Any]]:
    """Keys that save more and more, each with all of those before."""
    if sizes.micro > 1:
        yield {MICRO: 1, STEPS: sizes.steps * sizes.micro}
    if sizes.pipeline > 1:
        yield {"pipeline": {"activation_checkpoint_interval": 1}}
    if sizes.replicas > 1:
        yield from ({ZERO: {"stage": stage}} for stage in (2, 3) if stage > sizes.stage)
    stage = 3 if sizes.replicas > 1 else sizes.stage
    if stage and sizes.bucket > SMALL_BUCKET:
        yield {ZERO: _small_buckets(stage)}
    if sizes.states_away < 1:
        yield {ZERO: {**({} if stage else {"stage": 1}), OPTIMIZER: {"device": "cpu", "ratio": 1.0}}}
    if not sizes.parameters_away:
        yield {ZERO: {**({} if stage == 3 else {"stage": 3}), PARAMETERS: {"device": "cpu"}}}


def merged(config: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """The config with these keys; sections keep the others of theirs."""
    made = dict(config)
    for key, value in keys.items():
        old = made.get(key)
        made[key] = merged(old, value) if isinstance(value, Mapping) and isinstance(old, Mapping) else value
    return made


def _small_buckets(stage: int) -> dict[str, int]:
    more = {"stage3_prefetch_bucket_size": SMALL_BUCKET} if stage == 3 else {}
    return {"reduce_bucket_size": SMALL_BUCKET, **more}
