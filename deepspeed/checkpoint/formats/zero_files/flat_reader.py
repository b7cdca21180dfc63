"""Where parameters lie in the flat tensors of DeepSpeed's optimizer files: stages 1 and 2, and stage 3."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.formats.checked_files import Opened
from deepspeed.checkpoint.formats.guard import rank_count, shapes_of
from deepspeed.checkpoint.formats.source import IntervalIndex, StoredInterval
from deepspeed.checkpoint.formats.zero_files.experts import ExpertLayers
from deepspeed.errors import CheckpointError
from deepspeed.fragments import ContiguousLayout, StripedLayout

Open = Callable[[int], Opened]
"""A rank's optimizer file.

Ranks are data-parallel ones; where experts are dealt to tensor-parallel ranks, too, both are numbered through.
"""


@dataclass(slots=True)
class Sharding:
    """Flat tensors, each cut over ranks: for each its parameters, its layout and how to get a kind out of a file."""

    stage: int
    world: int
    shapes: list[dict[str, torch.Size]]
    """Per flat tensor: its parameters in order."""
    layouts: Sequence[ContiguousLayout | StripedLayout]
    open: Open
    files: Mapping[int, str]
    near: int
    """The rank whose file is asked for what all files say alike."""
    param_groups: list[Mapping[str, Any]] = field(default_factory=list)
    members: list[list[int]] = field(default_factory=list)
    """Per parameter group: its flat tensors."""
    place: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Name → (flat tensor, number in it, the part of the experts that it belongs to)."""
    experts: ExpertLayers | None = None
    sizes: Sequence[int] = ()
    """Per flat tensor: over how many ranks its experts are spread, each with a tensor of its own; 0: it has none."""
    slot: int = 0
    """The tensor-parallel rank of which these files are, where these are numbered, too."""

    def fill(self, pieces: IntervalIndex) -> None:
        """Enter every piece; no file but the near one is opened for it."""
        for flat, shapes in enumerate(self.shapes):
            state = self.states(self.open(self.near).state, flat)
            kinds = ["master", *(key for key, value in state.items() if isinstance(value, Tensor) and value.ndim)]
            for part in range(self._parts(flat)):
                for number, (name, shape) in enumerate(zip(self._names(flat, part), shapes.values(), strict=True)):
                    self.place[name] = flat, number, part
                    pieces.shapes[name] = shape
                    for copy in range(self.layouts[flat].world):
                        start, stop = self.layouts[flat].interval(number, copy)
                        if start < stop:
                            self._enter(pieces, name, kinds, copy)

    def _parts(self, flat: int) -> int:
        """How many flat tensors of other parameters there are in the place of this one."""
        return max(self.sizes[flat], 1) if self.sizes else 1

    def _names(self, flat: int, part: int) -> list[str]:
        listed = list(self.shapes[flat])
        return listed if self.experts is None else self.experts.names(listed, self._parts(flat), part)

    def _rank(self, flat: int, part: int, copy: int) -> int:
        """The rank in whose file a shard is."""
        if self.experts is None:
            return copy
        if not self.sizes[flat]:
            return copy * self.experts.tensor + self.slot
        return self.experts.grid(self.sizes[flat]).rank(part, copy)

    def copy_of(self, flat: int, rank: int) -> int:
        """Which of the shards of a flat tensor a rank has."""
        if self.experts is None:
            return rank
        return self.experts.grid(self.sizes[flat]).copy_of(rank) if self.sizes[flat] else rank // self.experts.tensor

    def _enter(self, pieces: IntervalIndex, name: str, kinds: Sequence[str], copy: int) -> None:
        flat, number, part = self.place[name]
        layout, rank = self.layouts[flat], self._rank(flat, part, copy)
        file = self.files.get(rank, f"the optimizer file of rank {rank}")
        for kind in kinds:
            load = functools.partial(self._load, rank, flat, kind, name)
            position = layout.position(number, copy)
            pieces.add(name, kind, StoredInterval(layout.interval(number, copy), load, position, file))

    def _load(self, rank: int, flat: int, kind: str, name: str) -> tuple[Tensor, Opened]:
        opened = self.open(rank)
        tensor = self.take(opened.state, flat, kind)
        wanted = self.layouts[flat].shard_numel
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{self.files[rank]} has no {kind!r} of group {flat}, which holds {name}")
        if tensor.numel() > wanted:
            raise CheckpointError(
                f"{self.files[rank]}: {kind} of group {flat} has {tensor.numel()} elements, but the parameters that "
                f"the model file lists ({name} among them) give {wanted} on each of {self.world} ranks"
            )
        return tensor, opened

    def take(self, entries: Mapping[str, Any], flat: int, kind: str) -> Any:
        """A kind of a flat tensor out of the entries of a file."""
        if kind == "master":
            key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
            return entries["optimizer_state_dict"][key][flat]
        return self.states(entries, flat).get(kind)

    def states(self, entries: Mapping[str, Any], flat: int) -> Mapping[str, Any]:
        """The optimizer's state of a flat tensor in the entries of a file."""
        inner = entries["optimizer_state_dict"]
        base = inner["optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"]
        if isinstance(base, Mapping):
            state: Mapping[str, Any] = base["state"].get(flat, {})
            return state
        step = inner.get("base_optimizer_state_step")
        return {**({} if step is None else {"step": step}), **base[flat]}

    @property
    def groups(self) -> list[tuple[Sequence[str], Mapping[str, Any]]]:
        """The optimizer's groups."""
        result: list[tuple[Sequence[str], Mapping[str, Any]]] = []
        for group, flats in zip(self.param_groups, self.members, strict=True):
            names = [name for flat in flats for part in range(self._parts(flat)) for name in self._names(flat, part)]
            result.append((names, {key: value for key, value in group.items() if key != "params"}))
        return result

    def scalars(self, name: str) -> Mapping[str, Any]:
        """The state of a parameter that has no elements of its own."""
        if name not in self.place:
            return {}
        opened = self.open(self._holder(name))
        single = opened.state["optimizer_state_dict"].get("parameter_scalars")
        if single is not None and name in single:
            return opened.checked(single[name])
        state = self.states(opened.state, self.place[name][0])
        scalars = {key: value for key, value in state.items() if not (isinstance(value, Tensor) and value.ndim)}
        return opened.checked(scalars)

    def stateless(self, name: str) -> bool:
        """Whether the optimizer has not touched a parameter yet, although others of its group."""
        if name not in self.place:
            return False
        entries = self.open(self._holder(name)).state["optimizer_state_dict"]
        if "without_state" in entries:
            return name in entries["without_state"]
        single = entries.get("parameter_scalars")
        return single is not None and name in single and not single[name]

    def _holder(self, name: str) -> int:
        flat, number, part = self.place[name]
        layout = self.layouts[flat]
        intervals = [layout.interval(number, copy) for copy in range(layout.world)]
        holders = [self._rank(flat, part, copy) for copy, (start, stop) in enumerate(intervals) if start < stop]
        if self.near in holders:
            return self.near
        return next((r for r in holders if r in self.files), holders[0] if holders else self.near)


def sharding_of(
    param_shapes: Sequence[Mapping[str, Any]],
    open_: Open,
    files: Mapping[int, str],
    where: Path,
    *,
    near: int,
    partial: bool = False,
    experts: ExpertLayers | None = None,
) -> Sharding:
    """Stages 1 and 2, the files of BF16_Optimizer, which name no stage, and stage 3, which cuts by parameter."""
    first = open_(near).state["optimizer_state_dict"]
    by_parameter = "fp32_flat_groups" in first
    shapes = shapes_of(param_shapes, where)
    count = first.get("partition_count", len(files))
    if by_parameter:
        groups = first["optimizer_state_dict"]["param_groups"]
        members = [list(group["params"]) for group in groups]
        flats = [flat for group in members for flat in group]
        if len(set(flats)) != len(flats) or not set(flats) <= set(range(len(shapes))):
            raise CheckpointError(f"{where}: the optimizer's groups do not name {len(shapes)} flat tensors once each")
    else:
        base = first["base_optimizer_state"]
        groups = (
            base["param_groups"] if isinstance(base, Mapping) else first.get("param_groups") or [{} for _ in shapes]
        )
        members = [[place] for place in range(len(shapes))]
        count = count if experts is None else experts.world
    world = _world(count, files, where, partial, experts)
    sizes = [0] * len(shapes)
    if experts is not None:
        for size, own in zip(experts.of_groups(groups), members, strict=True):
            for flat in own:
                sizes[flat] = size
    worlds = [world if experts is None else experts.copies(size) for size in sizes]
    layouts: Sequence[ContiguousLayout | StripedLayout]
    if by_parameter:
        numels = [tuple(shape.numel() for shape in group.values()) for group in shapes]
        layouts = [StripedLayout(*each) for each in zip(numels, worlds, strict=True)]
        stage = 3
    else:
        gaps = first.get("param_alignment_paddings") or [[0] * len(group) for group in shapes]
        layouts = [_block(*each, where) for each in zip(shapes, gaps, worlds, strict=True)]
        stage = int(first.get("zero_stage", 1))
    sharding = Sharding(stage, world, shapes, layouts, open_, files, near, list(groups), members)
    if experts is not None:
        sharding.experts, sharding.sizes, sharding.slot = experts, sizes, near % experts.tensor
    _check_masters(sharding, near)
    return sharding


def _check_masters(sharding: Sharding, rank: int) -> None:
    """The master weights of a file must be as many as the model file's shapes say."""
    entries = sharding.open(rank).state
    for flat, layout in enumerate(sharding.layouts):
        tensor = sharding.take(entries, flat, "master")
        least = layout.shard_numel
        if isinstance(layout, ContiguousLayout):
            least = min(max(layout.filled - sharding.copy_of(flat, rank) * least, 0), least)
        held = tensor.numel() if isinstance(tensor, Tensor) else 0
        if not least <= held <= layout.shard_numel:
            names = ", ".join(list(sharding.shapes[flat])[:3])
            raise CheckpointError(
                f"{sharding.files[rank]}: group {flat} ({names}, ...) has {held} master weights, expected {least}: "
                "the file is damaged or belongs to another checkpoint"
            )


def _world(count: Any, files: Mapping[int, str], where: Path, partial: bool, experts: ExpertLayers | None) -> int:
    counts = {rank_count(each, where) for each in (count if isinstance(count, (list, tuple)) else [count])}
    if len(counts) != 1:
        raise CheckpointError(f"{where}: groups are cut over {sorted(counts)} ranks; expert groups cannot be read")
    world = counts.pop()
    ranks = world * (1 if experts is None else experts.tensor)
    missing = [rank for rank in range(ranks) if rank not in files]
    if (missing and not partial) or len(files) > ranks:
        raise CheckpointError(
            f"{where} was written by {ranks} ranks, but there are optimizer files of ranks {sorted(files)}"
            + (f": rank {missing[0]}'s is missing" if missing else "")
        )
    return world


def _block(shapes: Mapping[str, torch.Size], gaps: Sequence[int], world: int, where: Path) -> ContiguousLayout:
    """The layout whose paddings between parameters are those recorded."""
    numels = tuple(shape.numel() for shape in shapes.values())
    for gap in (1, 2, 4, 8, 16):
        layout = ContiguousLayout(numels, world, gap=gap)
        ends = [start + numel for start, numel in zip(layout.starts, numels, strict=True)]
        found = [start - end for start, end in zip(layout.starts[1:], ends, strict=False)]
        if found == list(gaps[:-1]) and not any(gaps[-1:]):
            return layout
    raise CheckpointError(f"{where}: paddings {list(gaps)} between parameters of sizes {numels} follow no known rule")
