"""How long a traced step takes at a device's ceilings: products, traffic, and what links leave exposed.

An operation takes as long as its products or its bytes do, whichever is longer. Collectives of data-parallel ranks run
concurrently with the phase that they are in, where the config overlaps them; those that layers wait for do not. Stages
of a pipeline wait for the slowest, and while it fills and drains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepspeed.parallel.axes import SAMPLE_AXES
from deepspeed.planning.ceilings import DeviceCeilings
from deepspeed.planning.trace import BACKWARD, FORWARD, STEP, Collective, OperationWork, RankTrace

_NARROW = frozenset(("bfloat16", "float16"))
_PRODUCTS = ("mm", "bmm", "attention", "conv", "linear", "matmul")
_LARGEST = 3


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Seconds of one phase of a step, of all its micro batches."""

    phase: str
    computes: float
    sends: float
    exposed: float
    """What of sending is left when computing is done."""

    @property
    def total(self) -> float:
        """From begin to end."""
        return self.computes + self.exposed


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step and where they go."""

    phases: tuple[PhaseTime, ...]
    bubble: float
    """Waiting for other stages of a pipeline."""
    flops: float
    """Operations of this rank."""
    utilization: float
    """Operations of a forward and its backward, without those that are computed again, over the device's peak (MFU)."""
    largest: tuple[tuple[str, float], ...]
    """The largest costs."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(phase.total for phase in self.phases) + self.bubble


def step_time(traces: Sequence[RankTrace], device: DeviceCeilings) -> StepTime:
    """Of the slowest of these ranks."""
    return max((_of_rank(trace, device) for trace in traces), key=lambda found: found.total)


def _of_rank(trace: RankTrace, device: DeviceCeilings) -> StepTime:
    phases, costs = [], dict[str, float]()
    for phase in (FORWARD, BACKWARD, STEP):
        computes = 0.0
        for work in trace.work:
            if work.phase == phase:
                seconds = _seconds(work, device)
                computes += seconds
                _add(costs, f"{work.name} in {phase}", seconds)
        hidden = waited = 0.0
        for each in trace.collectives:
            if each.phase == phase:
                seconds = each.count * _sending(each, device)
                _add(costs, f"{each.op} over {each.axis} in {phase}", seconds)
                concurrent = trace.overlaps and phase != STEP and _of_samples(each)
                hidden, waited = (hidden + seconds, waited) if concurrent else (hidden, waited + seconds)
        phases.append(PhaseTime(phase, computes, hidden + waited, waited + max(hidden - computes, 0.0)))
    busy = sum(phase.total for phase in phases if phase.phase != STEP)
    bubble = busy * (trace.stages - 1) / trace.batch[2]
    if bubble:
        costs["waiting for other stages"] = bubble
    flops = sum(work.flops for work in trace.work)
    total = sum(phase.total for phase in phases) + bubble
    useful = 3 * sum(work.flops for work in trace.work if work.phase == FORWARD and _is_product(work))
    peak = device.narrow_flops if _mostly_narrow(trace) else device.wide_flops
    largest = sorted(costs.items(), key=lambda item: -item[1])[:_LARGEST]
    return StepTime(tuple(phases), bubble, flops, useful / (peak * total) if total else 0.0, tuple(largest))


def _add(costs: dict[str, float], name: str, seconds: float) -> None:
    costs[name] = costs.get(name, 0.0) + seconds


def _seconds(work: OperationWork, device: DeviceCeilings) -> float:
    narrow = work.dtype in _NARROW and _is_product(work)
    rate = device.narrow_flops if narrow else device.wide_flops
    return max(work.flops / rate, work.nbytes / device.bandwidth, work.count * device.launch)


def _sending(each: Collective, device: DeviceCeilings) -> float:
    return max(each.links.within / device.within, each.links.between / device.between)


def _of_samples(each: Collective) -> bool:
    return set(each.axis.split("+")) <= set(SAMPLE_AXES)


def _is_product(work: OperationWork) -> bool:
    return any(word in work.name for word in _PRODUCTS)


def _mostly_narrow(trace: RankTrace) -> bool:
    narrow: Mapping[bool, float] = {
        kind: sum(work.flops for work in trace.work if (work.dtype in _NARROW) is kind) for kind in (True, False)
    }
    return narrow[True] >= narrow[False]
