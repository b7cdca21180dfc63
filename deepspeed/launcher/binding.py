"""Cores for ranks: an equal share of the physical cores each, and the numactl words that bind to them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepspeed.launcher.errors import LaunchError

_CPUS = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")
_RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Binding:
    """How one rank is bound: words before its command, or else cores that its process is limited to before it runs."""

    cores: tuple[int, ...]
    prefix: tuple[str, ...]

    @property
    def affinity(self) -> tuple[int, ...]:
        """The cores to set for the process; empty where the prefix does it."""
        return () if self.prefix else self.cores


def parse_range_list(rng_str: str) -> list[int]:
    """ "0,2-4,6" → [0, 2, 3, 4, 6]; the ranges ascend, do not overlap, and there are no spaces."""
    cores: list[int] = []
    for part in rng_str.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(
                f"core list {rng_str!r}: {part!r} is neither a number nor a range; expected a list such as 0,2-4,6"
            )
        first = int(match[1])
        last = int(match[2] or match[1])
        if last < first:
            raise ValueError(f"core list {rng_str!r}: the range {part!r} descends; write {last}-{first}")
        if cores and first <= cores[-1]:
            raise ValueError(
                f"core list {rng_str!r}: {part!r} begins at {first}, but {cores[-1]} is already listed; "
                "the ranges must ascend and not overlap"
            )
        cores.extend(range(first, last + 1))
    return cores


def _cores(path: Path) -> list[int] | None:
    """A core list of the kernel; None where there is no such file, empty for a NUMA node without cores."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return parse_range_list(text) if text else []


@dataclass(frozen=True, slots=True)
class Topology:
    """NUMA node → its cores, and node → distance to every node, as the kernel tells; empty where it does not."""

    nodes: Mapping[int, frozenset[int]]
    distances: Mapping[int, Sequence[int]]

    @classmethod
    def read(cls, root: Path = _NODES) -> Topology:
        """The topology of this machine."""
        nodes, distances = {}, {}
        for folder in root.glob("node[0-9]*"):
            cores = _cores(folder / "cpulist")
            if cores is not None:
                number = int(folder.name.removeprefix("node"))
                nodes[number] = frozenset(cores)
                file = folder / "distance"
                distances[number] = [int(word) for word in file.read_text().split()] if file.is_file() else []
        return cls(dict(sorted(nodes.items())), distances)

    def node_of(self, core: int) -> int:
        """The first node that has this core."""
        return next((node for node, cores in self.nodes.items() if core in cores), 0)

    def memory(self, cores: Collection[int]) -> list[str]:
        """numactl's words for the memory of a rank whose cores lie in one node; none if they span several."""
        around = [node for node, there in self.nodes.items() if there.issuperset(cores)]
        if not around:
            return []
        # Nodes without cores are memory of another kind, such as HBM in flat mode: prefer the nearest, since it is
        # small and a rank must be able to overflow into ordinary memory.
        bare = [node for node, there in self.nodes.items() if not there]
        if bare and len(around) == 1:
            order = list(self.nodes)
            far = self.distances.get(around[0]) or []
            nearest = min(bare, key=lambda node: far[order.index(node)] if len(far) == len(order) else node)
            return ["-p", str(nearest)]
        # Several nodes with the same cores are a fake split of one.
        return ["-m", ",".join(map(str, around))]


def ranges(cores: Collection[int]) -> str:
    """{0, 1, 2, 6} → "0-2,6"."""
    spans: list[list[int]] = []
    for core in sorted(cores):
        if spans and core == spans[-1][1] + 1:
            spans[-1][1] = core
        else:
            spans.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _physical(allowed: Collection[int], topology: Topology, root: Path) -> list[int]:
    """One of the allowed hardware threads of each core, node by node so that a rank's share lies close together."""
    chosen = []
    for core in allowed:
        siblings = _cores(root / f"cpu{core}" / "topology" / "thread_siblings_list") or [core]
        if core == min(set(siblings) & set(allowed)):
            chosen.append(core)
    return sorted(chosen, key=lambda core: (topology.node_of(core), core))


def share(cores: Sequence[int], local_rank: int, local_size: int) -> tuple[int, ...]:
    """The cores of one rank: equal parts, what is left over stays free."""
    each = len(cores) // local_size
    if each == 0:
        raise LaunchError(
            f"{local_size} ranks cannot be bound to {len(cores)} cores ({ranges(cores) or 'none'}): each needs at "
            "least one; start fewer ranks or give a longer --bind_core_list"
        )
    return tuple(cores[local_rank * each : (local_rank + 1) * each])


def bind(local_size: int, core_list: str | None, environ: Mapping[str, str] = os.environ) -> list[Binding]:
    """A binding for each rank of this node; an error where it cannot be done."""
    if environ.get("KMP_AFFINITY"):
        raise LaunchError(
            f"KMP_AFFINITY={environ['KMP_AFFINITY']!r} places threads and so contradicts --bind_cores_to_rank: "
            "unset it, or drop the option"
        )
    if not hasattr(os, "sched_getaffinity"):  # the only way to ask; mypy knows it by platform
        raise LaunchError("--bind_cores_to_rank needs Linux: this system does not let a process choose its cores")
    allowed = os.sched_getaffinity(0)
    topology = Topology.read()
    if core_list is None:
        cores = _physical(allowed, topology, _CPUS)
    else:
        try:
            cores = parse_range_list(core_list)
        except ValueError as error:
            raise LaunchError(f"--bind_core_list: {error}") from error
        if missing := set(cores) - allowed:
            raise LaunchError(
                f"--bind_core_list {core_list}: this process may not use {ranges(missing)}, only {ranges(allowed)}"
            )
    numactl = shutil.which("numactl")
    bindings = []
    for local_rank in range(local_size):
        own = share(cores, local_rank, local_size)
        prefix = [numactl, *topology.memory(own), "-C", ranges(own)] if numactl else []
        bindings.append(Binding(own, tuple(prefix)))
    return bindings
