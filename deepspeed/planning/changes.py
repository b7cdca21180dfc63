"""What to change so that a job fits: every proposal is planned again, and none changes the samples of a step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from deepspeed.config import load
from deepspeed.config.batch import MICRO, STEPS, TRAIN
from deepspeed.errors import DeepSpeedError, UsageError
from deepspeed.log import logger
from deepspeed.memory.savings import CHECKPOINTING, JobSizes, Saving, all_savings, merged, savings
from deepspeed.pipe.module import PipelineModule
from deepspeed.planning.planner import Cluster, Plan, plan_model
from deepspeed.planning.trace import PlannedModel

Config = dict[str, Any]

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


def _sizes(config: Config, found: Plan) -> JobSizes:
    """What decides which changes there are."""
    axes, (_, micro, steps) = found.largest.axes, found.largest.batch
    zero = load(copy.deepcopy(config), partial=True).schema.zero_optimization
    away = zero.offload_optimizer if zero.offloads_optimizer else None
    return JobSizes(
        micro=micro,
        steps=steps,
        replicas=axes.get("dp", 1) * axes.get("sp", 1),
        stage=int(zero.stage),
        bucket=int(zero.reduce_bucket_size),
        states_away=0.0 if away is None else float(away.ratio),
        parameters_away=zero.offloads_parameters,
        pipeline=found.largest.stages,
    )


def _single(model: PlannedModel, found: Plan) -> Iterator[Change]:
    """One change each."""
    base = _explicit(model, found)
    for saving in savings(_sizes(base, found)):
        prepare = _checkpoint_blocks if saving.code else None
        yield Change(str(saving), merged(base, saving.keys), saving.code, prepare)
    yield from _slices(base, found)


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
    """Several changes at once, each with those before; activations are computed again if they can be."""
    base = _explicit(model, found)
    sizes = _sizes(base, found)
    keys: dict[str, Any] = {}
    again: tuple[str, Callable[[nn.Module], None] | None] = ("", None)
    if sizes.pipeline == 1 and replanned(model, found.cluster, Change("", base, CHECKPOINTING, _checkpoint_blocks)):
        again = CHECKPOINTING, _checkpoint_blocks
    for more in all_savings(sizes):
        keys = merged(keys, more)
        text = str(Saving(keys)) + (f"; {again[0]} in the script" if again[0] else "")
        yield Change(text, merged(base, keys), *again)


def least_ranks(model: PlannedModel, found: Plan) -> int | None:
    """The fewest ranks, whole nodes of them, on which the job fits with the same samples a step; None: there are none.

    Its most saving config is tried, since the number matters where no change fits.
    """
    saving = [Change("", _explicit(model, found)), *_together(model, found)][-1]
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
