"""Splits of an axis in two levels: nodes and the ranks in them, or runs of neighbours (hpZ); pure arithmetic.

Every split turns one axis into two, `inter` and `intra`: a rank's intra group are its neighbours, its inter group
the ranks that hold the same place in the other intra groups of the same axis group.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from deepspeed.errors import LayoutError
from deepspeed.log import warn_once
from deepspeed.parallel.axes import Axis, Ranks

_NODE_VARIABLES = ("LOCAL_SIZE", "LOCAL_WORLD_SIZE")


class AxisLevels(NamedTuple):
    """The two levels of one axis."""

    inter: Axis
    intra: Axis


def ranks_per_node(world: int, given: int | None = None, environ: Mapping[str, str] | None = None) -> int:
    """How many ranks each node runs: the argument, else LOCAL_SIZE or LOCAL_WORLD_SIZE; must divide the world."""
    count = _from_environment(world, os.environ if environ is None else environ) if given is None else given
    if count < 1 or world % count:
        raise LayoutError(
            f"{count} ranks per node do not fill whole nodes with a world size of {world}. "
            f"Run the same number of ranks on every node, or give the ranks per node of this job."
        )
    return count


def split(axis: Axis, size: int) -> AxisLevels:
    """Neighbours in runs of `size`, and the ranks with the same place in each run."""
    if size < 1 or axis.size % size:
        raise LayoutError(
            f"groups of {size} do not divide the {axis.size} ranks of axis {axis.name!r} evenly. "
            f"Use a size that divides {axis.size}."
        )
    runs = [[group[at : at + size] for at in range(0, axis.size, size)] for group in axis.groups]
    return _levels(axis, runs)


def node_split(axis: Axis, per_node: int) -> AxisLevels:
    """Ranks of the axis on the same node, and across nodes; every node must hold the same number of them."""
    ranks_per_node(axis.world, per_node)
    runs = [_by_node(group, per_node) for group in axis.groups]
    counts = sorted({len(run) for group in runs for run in group})
    if len(counts) != 1:
        example = next(group for group in runs if any(len(run) != len(group[0]) for run in group))
        raise LayoutError(
            f"with {per_node} ranks per node, axis {axis.name!r} has {' or '.join(map(str, counts))} ranks on a "
            f"node: {[list(run) for run in example]}. Choose sizes so that every node holds the same number."
        )
    return _levels(axis, runs)


def hpz_split(axis: Axis, partition_size: int) -> AxisLevels:
    """The secondary shards of hpZ: runs of min(partition_size, axis size) neighbours; 0 and 1 mean none."""
    if partition_size < 0:
        raise LayoutError(
            f"zero_hpz_partition_size is {partition_size}; use the ranks per secondary shard, or 1 for none."
        )
    size = min(max(partition_size, 1), axis.size)
    if axis.size % size:
        raise LayoutError(
            f"zero_hpz_partition_size {partition_size} does not divide the {axis.size} ranks of axis "
            f"{axis.name!r}. Use a size that divides {axis.size}, best the number of ranks per node."
        )
    return split(axis, size)


def mics_split(axis: Axis, shard_size: int) -> AxisLevels:
    """The shard groups of MiCS, runs of `shard_size` neighbours, and the ranks that hold equal shards."""
    if not 1 < shard_size <= axis.size or axis.size % shard_size:
        divisors = ", ".join(str(size) for size in range(2, axis.size + 1) if axis.size % size == 0) or "none"
        raise LayoutError(
            f"zero_optimization.mics_shard_size is {shard_size}, and {axis.size} ranks of axis {axis.name!r} share "
            f"parameters. Use a divisor of these above 1 ({divisors}), or -1 for no MiCS; on one rank remove the key, "
            "and for whole copies on each rank use zero_optimization.stage 0."
        )
    return split(axis, shard_size)


def _levels(axis: Axis, runs: list[list[Ranks]]) -> AxisLevels:
    intra = tuple(run for group in runs for run in group)
    inter = tuple(places for group in runs for places in zip(*group, strict=True))
    return AxisLevels(Axis(f"{axis.name}.inter", inter), Axis(f"{axis.name}.intra", intra))


def _by_node(group: Ranks, per_node: int) -> list[Ranks]:
    nodes: dict[int, list[int]] = {}
    for rank in group:
        nodes.setdefault(rank // per_node, []).append(rank)
    return [tuple(ranks) for ranks in nodes.values()]


def _from_environment(world: int, environ: Mapping[str, str]) -> int:
    found = {name: environ[name].strip() for name in _NODE_VARIABLES if environ.get(name, "").strip()}
    if world == 1:
        return 1
    if len(set(found.values())) > 1:
        # torchrun sets the second one; the first stays in shells where somebody once exported it
        warn_once(f"LOCAL_SIZE={found['LOCAL_SIZE']} is not used: LOCAL_WORLD_SIZE is {found['LOCAL_WORLD_SIZE']}.")
        del found["LOCAL_SIZE"]
    for name, value in found.items():
        if not (value.isascii() and value.isdigit() and len(value) < 10):
            raise LayoutError(f"{name} is {value!r}; it must be the number of ranks on this node.")
        return int(value)
    raise LayoutError(
        f"the number of ranks per node is unknown for a world size of {world}: neither LOCAL_SIZE nor "
        "LOCAL_WORLD_SIZE is set. Start with a launcher that sets one, or pass ranks_per_node."
    )
