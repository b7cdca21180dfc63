"""What to change so that a job fits: every proposal is planned again, and none changes the samples of a step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from deepspeed.config.batch import MICRO, STEPS, TRAIN
from deepspeed.errors import DeepSpeedError, UsageError
from deepspeed.log import logger
from deepspeed.pipe.module import PipelineModule
from deepspeed.planning.planner import Cluster, Plan, plan_model
from deepspeed.planning.trace import PlannedModel

Config = dict[str, Any]

_BUCKET = 50_000_000
_MOST_RANKS = 1 << 17


@dataclass(frozen=True)
class Change:
    """A change of the config, and of the model where `code` says what to write into the script."""

    text: str
    config: Config
    code: str = ""
    prepare: Callable[[nn.Module], None] | None = None


@dataclass(frozen=True)
class Proposal:
    """A change and the plan of the job with it."""

    change: Change
    plan: Plan

    @property
    def slower(self) -> float | None:
        """Seconds of a step; None without a device."""
        return None if self.plan.time is None else self.plan.time.total


def proposals(model: PlannedModel, found: Plan) -> list[Proposal]:
    """Changes with which the job fits, the fastest first; single ones, and only where none fits several at once."""
    single = list(_single(model, found))
    fitting = list(_fitting(model, found, single))
    if not fitting:
        fitting = list(_fitting(model, found, _together(model, found)))
    return sorted(fitting, key=lambda each: each.slower or 0.0)


def _fitting(model: PlannedModel, found: Plan, changes: Iterator[Change] | list[Change]) -> Iterator[Proposal]:
    for change in changes:
        made = replanned(model, found.cluster, change)
        if made is not None and made.fits and made.largest.batch[0] == found.largest.batch[0]:
            yield Proposal(change, made)


def replanned(model: PlannedModel, cluster: Cluster, change: Change) -> Plan | None:
    """The plan with a change; None where the engine refuses it."""
    try:
        return plan_model(changed(model, change), cluster)
    except DeepSpeedError as error:
        logger.debug("%s is no choice: %s", change.text, error)
        return None


def changed(model: PlannedModel, change: Change) -> PlannedModel:
    """The job with a change."""
    return replace(model, config=change.config, batch=None, prepare=change.prepare or model.prepare)


def _single(model: PlannedModel, found: Plan) -> Iterator[Change]:
    """One change each."""
    base = _explicit(model, found)
    zero, (_, micro, steps) = _zero(base), found.largest.batch
    stage = int(zero.get("stage", 0))
    samples = found.largest.axes.get("dp", 1) * found.largest.axes.get("sp", 1)
    yield from _micro_batches(base, micro, steps)
    yield from _checkpointing(base, found)
    if samples > 1:
        for other in range(stage + 1, 4):
            yield Change(f'"zero_optimization": {{"stage": {other}}}', _with_zero(base, stage=other))
    if stage and zero.get("reduce_bucket_size", 500_000_000) > _BUCKET:
        smaller = _with_zero(base, reduce_bucket_size=_BUCKET, stage3_prefetch_bucket_size=_BUCKET)
        yield Change(f'"zero_optimization": {{"reduce_bucket_size": {_BUCKET}}}', smaller)
    if not zero.get("offload_optimizer"):
        for ratio in (0.5, 1.0):
            section = {"device": "cpu", "ratio": ratio}
            yield Change(
                f'"zero_optimization": {{"offload_optimizer": {{"device": "cpu", "ratio": {ratio}}}}}',
                _with_zero(base, stage=max(stage, 1), offload_optimizer=section),
            )
    if stage == 3 and not zero.get("offload_param"):
        yield Change(
            '"zero_optimization": {"offload_param": {"device": "cpu"}}',
            _with_zero(base, offload_param={"device": "cpu"}),
        )
    yield from _slices(base, found)


def _micro_batches(base: Config, micro: int, steps: int) -> Iterator[Change]:
    """Smaller micro batches, more of them: as many samples a step."""
    for parts in (each for each in range(2, micro + 1) if micro % each == 0):
        sizes = {MICRO: micro // parts, STEPS: steps * parts}
        yield Change(f'"{MICRO}": {micro // parts}, "{STEPS}": {steps * parts}', {**base, **sizes})


def _checkpointing(base: Config, found: Plan) -> Iterator[Change]:
    if found.largest.stages > 1:
        for interval in (4, 1):
            section = {**base.get("pipeline", {}), "activation_checkpoint_interval": interval}
            text = f'"pipeline": {{"activation_checkpoint_interval": {interval}}}'
            yield Change(text, {**base, "pipeline": section})
    else:
        code = "model.gradient_checkpointing_enable()"
        yield Change(f"{code} in the script", base, code, _checkpoint_blocks)


def _checkpoint_blocks(model: nn.Module) -> None:
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if not callable(enable) or isinstance(model, PipelineModule):
        raise UsageError("the model has no gradient_checkpointing_enable()")
    enable()


def _slices(base: Config, found: Plan) -> Iterator[Change]:
    """Layers that ranks share; replicas become fewer, so that each takes more micro steps."""
    axes, steps = found.largest.axes, found.largest.batch[2]
    size, replicas = axes.get("tp", 1), axes.get("dp", 1)
    for times in (2, 4, 8):
        if replicas % times == 0 and size * times <= found.cluster.per_node:
            section = {**base.get("tensor_parallel", {}), "autotp_size": size * times}
            sizes = {STEPS: steps * times}
            text = f'"tensor_parallel": {{"autotp_size": {size * times}}}, "{STEPS}": {steps * times}'
            yield Change(text, {**base, "tensor_parallel": section, **sizes})


def _together(model: PlannedModel, found: Plan) -> Iterator[Change]:
    """Several changes at once, each list longer than the one before."""
    base, (_, micro, steps) = _explicit(model, found), found.largest.batch
    words: list[str] = []
    current = Change("", base)
    if micro > 1:
        sizes = {MICRO: 1, STEPS: steps * micro}
        words.append(f'"{MICRO}": 1, "{STEPS}": {steps * micro}')
        current = Change("; ".join(words), {**base, **sizes})
    for change in list(_checkpointing(current.config, found))[-1:]:
        words.append(change.text)
        current = Change("; ".join(words), change.config, change.code, change.prepare)
        yield current
    offload = {"device": "cpu", "ratio": 1.0}
    for keys in (
        {"stage": 2},
        {"stage": 3},
        {"reduce_bucket_size": _BUCKET, "stage3_prefetch_bucket_size": _BUCKET},
        {"offload_optimizer": offload},
        {"offload_param": {"device": "cpu"}},
    ):
        words = [word for word in words if not ("stage" in keys and word.startswith("stage"))]
        words.append(
            ", ".join(f"{key} {value if not isinstance(value, dict) else 'cpu'}" for key, value in keys.items())
        )
        current = replace(current, text="; ".join(words), config=_with_zero(current.config, **keys))
        yield current


def least_ranks(model: PlannedModel, found: Plan) -> int | None:
    """The fewest ranks, whole nodes of them, on which the job fits with the same samples a step; None: there are none.

    Its most saving config is tried, since the number matters where no change fits.
    """
    saving = list(_together(model, found))[-1]
    cluster, config = found.cluster, saving.config
    train = found.largest.batch[0]

    def fits(world: int) -> bool | None:
        change = replace(saving, config=_spread(config, found, world, train))
        made = replanned(model, replace(cluster, world=world), change)
        return None if made is None else bool(made.fits)

    world, last = cluster.world * 2, cluster.world
    while world <= _MOST_RANKS:
        answer = fits(world)
        if answer is None:
            return None
        if answer:
            break
        world, last = world * 2, world
    else:
        return None
    step = cluster.per_node if world > cluster.per_node else 1
    low, high = last, world
    while high - low > step:
        middle = (low + high) // 2 // step * step
        if middle in (low, high):
            break
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _spread(config: Config, found: Plan, world: int, train: int) -> Config:
    """The config with micro batches that make the same batch on so many ranks."""
    replicas = (
        world * found.largest.batch[0] // (found.largest.batch[1] * found.largest.batch[2]) // found.cluster.world
    )
    micro = int(config[MICRO])
    while micro > 1 and train % (micro * replicas):
        micro -= 1
    return {**config, MICRO: micro, STEPS: max(train // (micro * replicas), 1)}


def _explicit(model: PlannedModel, found: Plan) -> Config:
    """The config with the sizes of the batch as they are, so that a change of one shows in another."""
    _, micro, steps = found.largest.batch
    made: Config = copy.deepcopy(dict(model.config))
    made.pop(TRAIN, None)
    return {**made, MICRO: micro, STEPS: steps}


def _zero(config: Mapping[str, Any]) -> Mapping[str, Any]:
    section = config.get("zero_optimization")
    return section if isinstance(section, Mapping) else {}


def _with_zero(config: Config, **keys: Any) -> Config:
    return {**config, "zero_optimization": {**_zero(config), **keys}}
