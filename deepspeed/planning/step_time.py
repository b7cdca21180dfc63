"""How long a traced step takes at the ceilings of a device.

An operation takes as long as its products or its bytes do, whichever is longer. Collectives of data-parallel ranks run
concurrently with the phase that they are in, where the config overlaps them; those that layers wait for do not. The
schedule of a pipeline is simulated with what each of its ranks takes for a micro batch, and with its messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed.parallel.axes import SAMPLE_AXES
from deepspeed.pipe.schedule.simulate import Costs, Timeline, simulate
from deepspeed.planning.ceilings import DeviceCeilings
from deepspeed.planning.trace import (
    FORWARD,
    MESSAGES,
    PHASES,
    STEP,
    WEIGHTS,
    Collective,
    OperationWork,
    RankTrace,
)

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
    timeline: Timeline | None = None
    """Of the ranks of a pipeline, until the step of the optimizer begins."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(phase.total for phase in self.phases) + self.bubble


def step_time(traces: Sequence[RankTrace], device: DeviceCeilings) -> StepTime:
    """Of the rank that waits least for others."""
    found = [_phases(trace, device) for trace in traces]
    rank = max(range(len(traces)), key=lambda place: sum(phase.total for phase in found[place][0]))
    trace, (phases, costs) = traces[rank], found[rank]
    timeline = _played(traces, [phases for phases, _ in found], device)
    own = sum(phase.total for phase in phases)
    total = own
    if timeline is not None:
        total = timeline.length + max(phases[-1].total for phases, _ in found)
        costs["waiting for other stages"] = total - own
    useful = 3 * sum(work.flops for work in trace.work if work.phase == FORWARD and _is_product(work))
    peak = device.narrow_flops if _mostly_narrow(trace) else device.wide_flops
    return StepTime(
        phases,
        bubble=total - own,
        flops=sum(work.flops for work in trace.work),
        utilization=useful / (peak * total) if total else 0.0,
        largest=tuple(sorted(costs.items(), key=lambda item: -item[1])[:_LARGEST]),
        timeline=timeline,
    )


def _phases(trace: RankTrace, device: DeviceCeilings) -> tuple[tuple[PhaseTime, ...], dict[str, float]]:
    """The phases of one rank, and what its operations cost; the step is the last of them."""
    phases, costs = [], defaultdict[str, float](float)
    for phase in PHASES:
        computes = 0.0
        for work in trace.work:
            if work.phase == phase:
                seconds = _seconds(work, device)
                computes += seconds
                costs[f"{work.name} in {phase}"] += seconds
        hidden = waited = 0.0
        for each in trace.collectives:
            if each.phase == phase and not _is_message(trace, each):
                seconds = each.count * _sending(each, device)
                costs[f"{each.op} over {each.axis} in {phase}"] += seconds
                concurrent = trace.overlaps and phase != STEP and set(each.axis.split("+")) <= set(SAMPLE_AXES)
                hidden, waited = (hidden + seconds, waited) if concurrent else (hidden, waited + seconds)
        if phase != WEIGHTS or computes or hidden or waited:
            phases.append(PhaseTime(phase, computes, hidden + waited, waited + max(hidden - computes, 0.0)))
    return tuple(phases), costs


def _played(
    traces: Sequence[RankTrace], phases: Sequence[Sequence[PhaseTime]], device: DeviceCeilings
) -> Timeline | None:
    """The schedule of a pipeline on the clock of its ranks; those that were not traced are like one that was."""
    schedule = traces[0].schedule
    if schedule is None or len(schedule.ranks) < 2:
        return None
    costs = []
    for rank, row in enumerate(schedule.ranks):
        like = _alike(traces, rank)
        trace, found = traces[like], {phase.phase: phase.total for phase in phases[like]}
        sends = [each for each in trace.collectives if _is_message(trace, each) and each.op in ("send", "isend")]
        messages = sum(schedule.sent(action) is not None for action in row)
        forward, back, weights = (found.get(each, 0.0) / schedule.micro_batches for each in PHASES[:3])
        # a link carries a message whole; each of its two ranks counts half of it
        message = 2 * sum(each.count * _sending(each, device) for each in sends) / max(messages, 1)
        costs.append(Costs(forward, back, weights, message))
    return simulate(schedule, costs)


def _alike(traces: Sequence[RankTrace], rank: int) -> int:
    """The place of the trace of a stage with as many layers, at the same end of the pipeline where one is there."""
    places = {trace.stage: place for place, trace in enumerate(traces)}
    if rank in places:
        return places[rank]
    middle = [place for stage, place in places.items() if 0 < stage < traces[0].stages - 1]
    layers = traces[0].partition
    same = [place for place in middle if len(layers) > rank and layers[traces[place].stage] == layers[rank]]
    return next(iter(same or middle), 0)


def _seconds(work: OperationWork, device: DeviceCeilings) -> float:
    narrow = work.dtype in _NARROW and _is_product(work)
    rate = device.narrow_flops if narrow else device.wide_flops
    return max(work.flops / rate, work.nbytes / device.bandwidth, work.count * device.launch)


def _sending(each: Collective, device: DeviceCeilings) -> float:
    return max(each.links.within / device.within, each.links.between / device.between)


def _is_message(trace: RankTrace, each: Collective) -> bool:
    """Of a pipeline: what it takes is part of the simulation."""
    return trace.schedule is not None and each.axis == "pp" and each.op in MESSAGES


def _is_product(work: OperationWork) -> bool:
    return any(word in work.name for word in _PRODUCTS)


def _mostly_narrow(trace: RankTrace) -> bool:
    return sum(work.flops if work.dtype in _NARROW else -work.flops for work in trace.work) >= 0
