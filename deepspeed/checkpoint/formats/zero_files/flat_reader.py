"""Where parameters lie in the flat tensors of DeepSpeed's optimizer files: stages 1 and 2, and stage 3."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.formats.bounds import rank_count, shapes_of
from deepspeed.checkpoint.formats.checked_files import Opened
from deepspeed.checkpoint.formats.source import Piece, Pieces
from deepspeed.errors import CheckpointError
from deepspeed.fragments import Block, Striped

__all__ = ["Sharding", "by_group", "by_parameter"]

Open = Callable[[int], Opened]
"""A rank's optimizer file."""


@dataclass(slots=True)
class Sharding:
    """Flat tensors, each cut over ranks: for each its parameters, its layout and how to get a kind out of a file."""

    stage: int
    world: int
    shapes: list[dict[str, torch.Size]]
    """Per flat tensor: its parameters in order."""
    layouts: Sequence[Block | Striped]
    open: Open
    files: Mapping[int, str]
    near: int
    """The rank whose file is asked for what all files say alike."""
    take: Callable[[Mapping[str, Any], int, str], Any]
    """(entries, flat tensor, kind) → that tensor."""
    states: Callable[[Mapping[str, Any], int], Mapping[str, Any]]
    """(entries, flat tensor) → the optimizer's state of it."""
    param_groups: list[Mapping[str, Any]] = field(default_factory=list)
    members: list[list[int]] = field(default_factory=list)
    """Per parameter group: its flat tensors."""
    place: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Name → (flat tensor, number in it)."""

    def fill(self, pieces: Pieces) -> None:
        """Enter every piece; no file but the near one is opened for it."""
        for flat, shapes in enumerate(self.shapes):
            state = self.states(self.open(self.near).state, flat)
            kinds = ["master", *(key for key, value in state.items() if isinstance(value, Tensor) and value.ndim)]
            for number, (name, shape) in enumerate(shapes.items()):
                self.place[name] = flat, number
                pieces.shapes[name] = shape
                for rank in range(self.world):
                    start, stop = self.layouts[flat].interval(number, rank)
                    if start < stop:
                        self._enter(pieces, name, kinds, rank)

    def _enter(self, pieces: Pieces, name: str, kinds: Sequence[str], rank: int) -> None:
        flat, number = self.place[name]
        layout = self.layouts[flat]
        file = self.files.get(rank, f"the optimizer file of rank {rank}")
        for kind in kinds:
            load = functools.partial(self._load, rank, flat, kind, name)
            position = layout.position(number, rank)
            pieces.add(name, kind, Piece(layout.interval(number, rank), load, position, file))

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

    @property
    def groups(self) -> list[tuple[Sequence[str], Mapping[str, Any]]]:
        """The optimizer's groups."""
        result: list[tuple[Sequence[str], Mapping[str, Any]]] = []
        for group, flats in zip(self.param_groups, self.members, strict=True):
            names = [name for flat in flats for name in self.shapes[flat]]
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
        flat, number = self.place[name]
        holders = [r for r in range(self.world) if _size(self.layouts[flat].interval(number, r))]
        if self.near in holders:
            return self.near
        return next((r for r in holders if r in self.files), holders[0] if holders else self.near)


def _size(interval: tuple[int, int]) -> int:
    return interval[1] - interval[0]


def by_group(
    param_shapes: Sequence[Mapping[str, Any]],
    open_: Open,
    files: Mapping[int, str],
    where: Path,
    *,
    near: int,
    partial: bool = False,
) -> Sharding:
    """Stages 1 and 2, and the files of BF16_Optimizer, which name no stage."""
    first = open_(near).state["optimizer_state_dict"]
    world = _world(first.get("partition_count", len(files)), files, where, partial)
    shapes = shapes_of(param_shapes, where)
    gaps = first.get("param_alignment_paddings") or [[0] * len(group) for group in shapes]
    layouts = [_block(group, gap, world, where) for group, gap in zip(shapes, gaps, strict=True)]
    base = first["base_optimizer_state"]
    groups = base["param_groups"] if isinstance(base, Mapping) else first.get("param_groups") or [{} for _ in shapes]
    members = [[place] for place in range(len(shapes))]
    stage = int(first.get("zero_stage", 1))
    sharding = Sharding(
        stage, world, shapes, layouts, open_, files, near, _take_by_group, _state_by_group, list(groups), members
    )
    _check_masters(sharding, near)
    return sharding


def by_parameter(
    param_shapes: Sequence[Mapping[str, Any]],
    open_: Open,
    files: Mapping[int, str],
    where: Path,
    *,
    near: int,
    partial: bool = False,
) -> Sharding:
    """Stage 3."""
    first = open_(near).state["optimizer_state_dict"]
    world = _world(first.get("partition_count", len(files)), files, where, partial)
    shapes = shapes_of(param_shapes, where)
    layouts = [Striped(tuple(shape.numel() for shape in group.values()), world) for group in shapes]
    groups = first["optimizer_state_dict"]["param_groups"]
    members = [list(group["params"]) for group in groups]
    flats = [flat for group in members for flat in group]
    if len(set(flats)) != len(flats) or not set(flats) <= set(range(len(shapes))):
        raise CheckpointError(f"{where}: the optimizer's groups do not name {len(shapes)} flat tensors once each")
    sharding = Sharding(
        3, world, shapes, layouts, open_, files, near, _take_by_parameter, _state_by_parameter, groups, members
    )
    _check_masters(sharding, near)
    return sharding


def _check_masters(sharding: Sharding, rank: int) -> None:
    """The master weights of a file must be as many as the model file's shapes say."""
    entries = sharding.open(rank).state
    for flat, layout in enumerate(sharding.layouts):
        tensor = sharding.take(entries, flat, "master")
        least = layout.shard_numel
        if isinstance(layout, Block):
            least = min(max(layout.filled - rank * least, 0), least)
        held = tensor.numel() if isinstance(tensor, Tensor) else 0
        if not least <= held <= layout.shard_numel:
            names = ", ".join(list(sharding.shapes[flat])[:3])
            raise CheckpointError(
                f"{sharding.files[rank]}: group {flat} ({names}, ...) has {held} master weights, expected {least}: "
                "the file is damaged or belongs to another checkpoint"
            )


def _world(count: Any, files: Mapping[int, str], where: Path, partial: bool) -> int:
    counts = {rank_count(each, where) for each in (count if isinstance(count, (list, tuple)) else [count])}
    if len(counts) != 1:
        raise CheckpointError(f"{where}: groups are cut over {sorted(counts)} ranks; expert groups cannot be read")
    world = counts.pop()
    missing = [rank for rank in range(world) if rank not in files]
    if (missing and not partial) or len(files) > world:
        raise CheckpointError(
            f"{where} was written by {world} ranks, but there are optimizer files of ranks {sorted(files)}"
            + (f": rank {missing[0]}'s is missing" if missing else "")
        )
    return world


def _block(shapes: Mapping[str, torch.Size], gaps: Sequence[int], world: int, where: Path) -> Block:
    """The layout whose paddings between parameters are those recorded."""
    numels = tuple(shape.numel() for shape in shapes.values())
    for gap in (1, 2, 4, 8, 16):
        layout = Block(numels, world, gap=gap)
        ends = [start + numel for start, numel in zip(layout.starts, numels, strict=True)]
        found = [start - end for start, end in zip(layout.starts[1:], ends, strict=False)]
        if found == list(gaps[:-1]) and not any(gaps[-1:]):
            return layout
    raise CheckpointError(f"{where}: paddings {list(gaps)} between parameters of sizes {numels} follow no known rule")


def _take_by_group(entries: Mapping[str, Any], flat: int, kind: str) -> Any:
    if kind == "master":
        return entries["optimizer_state_dict"]["single_partition_of_fp32_groups"][flat]
    return _state_by_group(entries, flat).get(kind)


def _state_by_group(entries: Mapping[str, Any], flat: int) -> Mapping[str, Any]:
    base = entries["optimizer_state_dict"]["base_optimizer_state"]
    if isinstance(base, Mapping):
        state: Mapping[str, Any] = base["state"].get(flat, {})
        return state
    step = entries["optimizer_state_dict"].get("base_optimizer_state_step")
    return {**({} if step is None else {"step": step}), **base[flat]}


def _take_by_parameter(entries: Mapping[str, Any], flat: int, kind: str) -> Any:
    if kind == "master":
        return entries["optimizer_state_dict"]["fp32_flat_groups"][flat]
    return _state_by_parameter(entries, flat).get(kind)


def _state_by_parameter(entries: Mapping[str, Any], flat: int) -> Mapping[str, Any]:
    state: Mapping[str, Any] = entries["optimizer_state_dict"]["optimizer_state_dict"]["state"].get(flat, {})
    return state
