"""`plan`: what ranks of a job hold, send and take time for, traced on pretended ranks, and whether it fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from torch import nn

from deepspeed.comm.records import LinkBytes
from deepspeed.errors import UsageError
from deepspeed.planning.ceilings import DeviceCeilings, device_of
from deepspeed.planning.sources import ExampleBatch
from deepspeed.planning.step_time import StepTime, step_time
from deepspeed.planning.trace import Collective, PlannedModel, RankPlace, RankTrace, quiet, trace

FRAGMENTATION = "fragmentation"


@dataclass(frozen=True)
class Cluster:
    """The ranks of a job and what they run on."""

    world: int = 1
    per_node: int = 8
    device: DeviceCeilings | None = None
    memory: int | None = None
    """Bytes that a rank may use of its device; None: as much as the device has."""

    def place(self, rank: int) -> RankPlace:
        """A rank of them; CPUs send over gloo."""
        on_host = self.device is not None and self.device.name == "cpu"
        return RankPlace(rank, self.world, self.per_node, "gloo" if on_host else "nccl")

    def __post_init__(self) -> None:
        _require_sizes(world=self.world, per_node=self.per_node)
        if self.world > self.per_node and self.world % self.per_node:
            divisors = [size for size in range(1, self.world + 1) if self.world % size == 0 and size <= 64]
            raise UsageError(
                f"per_node {self.per_node} does not divide world {self.world}: nodes have equally many ranks. Use one "
                f"of {', '.join(map(str, divisors))}, or another world"
            )
        if self.memory is not None and self.memory <= 0:
            raise UsageError(f"memory is {self.memory}; a rank needs more than 0 bytes of its device")

    @property
    def limit(self) -> int | None:
        """Bytes of device memory; None where nothing says so."""
        if self.memory is not None:
            return self.memory
        return None if self.device is None else self.device.memory


@dataclass(frozen=True)
class Plan:
    """What was found; sizes are bytes of one rank."""

    cluster: Cluster
    config: Mapping[str, Any]
    """Without sections that only watch."""
    traces: tuple[RankTrace, ...]
    """One for each kind of stage of a pipeline; else that of rank 0, which holds most."""

    @cached_property
    def largest(self) -> RankTrace:
        """The rank that holds most."""
        return max(self.traces, key=lambda found: found.peak.total)

    @cached_property
    def kinds(self) -> dict[str, int]:
        """Device memory at the peak of the rank that holds most, by kind."""
        found = {kind: nbytes for kind, nbytes in self.largest.kinds.items() if nbytes}
        return {**found, FRAGMENTATION: self.fragmentation}

    @cached_property
    def fragmentation(self) -> int:
        """What the device's allocator rounds sizes up by."""
        block = 1 if self.cluster.device is None else self.cluster.device.allocator_block
        return sum((-size % block) * count for size, count in self.largest.sizes.items())

    @property
    def peak(self) -> int:
        """Device memory of the rank that holds most, when it holds most."""
        return self.largest.peak.total + self.fragmentation

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the memory; None where that is not known."""
        return None if self.cluster.limit is None else self.peak <= self.cluster.limit

    @cached_property
    def time(self) -> StepTime | None:
        """At the device's ceilings; None without a device."""
        return None if self.cluster.device is None else step_time(self.traces, self.cluster.device)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Of one step of the rank that sends most."""
        return max((found.collectives for found in self.traces), key=lambda found: sum(_sent(found)))

    @property
    def links(self) -> LinkBytes:
        """Bytes that the rank that sends most sends in a step."""
        return LinkBytes(*_sent(self.collectives))

    @property
    def assumed(self) -> tuple[str, ...]:
        """What could not be known."""
        every = [text for found in self.traces for text in found.assumed]
        more = ["operations take the memory that they take on a CPU"]
        if len(self.traces) < self.traces[0].stages:
            more.append("stages with equally many layers hold the same")
        if self.cluster.device is not None and not self.cluster.device.launch:
            more.append(f"products and links reach what their maker states ({self.cluster.device.source})")
        return tuple(dict.fromkeys([*every, *more]))

    def to_json(self) -> dict[str, Any]:
        """Everything but the curve of memory, as plain values."""
        largest, time = self.largest, self.time
        timeline = None if time is None else time.timeline
        train, micro, steps = largest.batch
        return {
            "world": self.cluster.world,
            "per_node": self.cluster.per_node,
            "axes": dict(largest.axes),
            "batch": {"train": train, "micro": micro, "accumulation": steps, "sequence": largest.sequence},
            "rank": largest.place.rank,
            "stage": largest.stage,
            "memory": {
                "device": self.kinds,
                "peak": self.peak,
                "limit": self.cluster.limit,
                "fits": self.fits,
                "phase": largest.peak.phase,
                "module": largest.peak.module,
                "host": dict(largest.host),
            },
            "collectives": [
                {**asdict(each), "ranks": len(each.ranks), "links": each.links._asdict()} for each in self.collectives
            ],
            "links": self.links._asdict(),
            "time": None
            if time is None
            else {
                "step": time.total,
                "bubble": time.bubble,
                "utilization": time.utilization,
                "phases": {phase.phase: asdict(phase) for phase in time.phases},
                "largest": dict(time.largest),
                "pipeline": None
                if timeline is None
                else {
                    "schedule": timeline.schedule.name,
                    "micro_batches": timeline.schedule.micro_batches,
                    "seconds": timeline.length,
                    "bubble": timeline.bubble,
                    "busy": [sum(end - begin for _, begin, end in row) for row in timeline.spans],
                },
            },
            "assumed": list(self.assumed),
        }


def plan(
    model_fn: Callable[[], nn.Module],
    config: Any,
    *,
    world: int = 1,
    per_node: int = 8,
    batch: int | None = None,
    sequence: int | None = None,
    device: str | DeviceCeilings | None = None,
    inputs: ExampleBatch | None = None,
) -> Plan:
    """What training this model with this config needs on `world` ranks; no weights, no device and no data are used.

    `batch` samples of `sequence` tokens make a micro batch where the config and the model leave that open.
    `inputs(batch, sequence)` gives what a model takes that is none of Transformers. `device`: see `ds_plan --device`.
    """
    _require_sizes(**{name: size for name, size in (("batch", batch), ("sequence", sequence)) if size is not None})
    facts = device_of(device) if isinstance(device, str) else device
    model = PlannedModel(model_fn, quiet(config), lambda: inputs, batch, sequence)
    return plan_model(model, Cluster(world, per_node, facts))


def plan_model(model: PlannedModel, cluster: Cluster) -> Plan:
    """Trace the ranks that differ."""
    first = trace(model, cluster.place(0))
    others = [trace(model, cluster.place(stage * cluster.world // first.stages)) for stage in _stages(first)]
    return Plan(cluster, model.config, (first, *others))


def _stages(first: RankTrace) -> Sequence[int]:
    """Pipeline ranks that may hold more than others: with equally many layers an earlier one holds most."""
    count, layers = first.stages, first.partition
    if len(layers) != count:
        return sorted({1, count - 1} & set(range(1, count)))
    middle = {layers[stage]: stage for stage in range(count - 2, 0, -1)}
    return sorted({*middle.values(), count - 1} - {0})


def _require_sizes(**sizes: object) -> None:
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{name} is {value!r}; expected a whole number above zero")


def _sent(collectives: Sequence[Collective]) -> tuple[float, float]:
    within = sum(each.count * each.links.within for each in collectives)
    return within, sum(each.count * each.links.between for each in collectives)
