"""Checkpoints seen in another way: stages and slices put together and cut anew, or a part of what is there.

A parameter `experts.down_proj` of which n ranks have a slice each is `experts.deepspeed_experts.<0 … n − 1>.down_proj`
in DeepSpeed's files, so that these have a place for it at every stage: a slice is called as if it were an expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.formats.checked_files import Opened
from deepspeed.checkpoint.formats.source import Small, Source, StoredPart
from deepspeed.checkpoint.formats.training_state import GroupState, TrainingState
from deepspeed.errors import CheckpointError
from deepspeed.fragments import ContiguousLayout, DimSplit, FlatLayout, StripedLayout

_MOST = 2**20  # slices, and intervals
_MARK = "deepspeed_experts"


class SourceAdapter(Source):
    """A `Source` over others: what it does not change, one of them says."""

    def __init__(self, sources: Sequence[Source], near: int = 0) -> None:
        """`near`: which of them is asked for what all of them say."""
        self.sources = sources
        self._near = sources[near] if near < len(sources) else sources[0]
        self.format, self.stage, self.world = self._near.format, self._near.stage, self._near.world
        self.copies = self._near.copies
        self.shapes, self.aliases = self._near.shapes, self._near.aliases

    @functools.cached_property
    def files(self) -> Sequence[str]:
        return self._near.files

    @functools.cached_property
    def buffers(self) -> Mapping[str, Tensor]:
        return self._near.buffers

    @functools.cached_property
    def groups(self) -> Sequence[tuple[Sequence[str], Mapping[str, Any]]]:
        return self._near.groups

    @functools.cached_property
    def small(self) -> Small:
        return self._near.small

    def _at(self, name: str) -> tuple[Source, str]:
        """The source that has what belongs to a parameter, and its name there."""
        return self._near, name

    def kinds(self, name: str) -> tuple[str, ...]:
        source, there = self._at(name)
        return source.kinds(there)

    def dtype(self, name: str) -> torch.dtype | None:
        source, there = self._at(name)
        return source.dtype(there)

    def find(self, name: str, kind: str, start: int = 0, stop: int | None = None) -> list[StoredPart]:
        source, there = self._at(name)
        return source.find(there, kind, start, stop)

    def scalars(self, name: str) -> Mapping[str, Any]:
        source, there = self._at(name)  # slices have them alike
        return source.scalars(there)

    def rank_state(self, rank: int) -> Mapping[str, Any]:
        return self._near.rank_state(rank)


def files_of(source: Source) -> Iterator[Source]:
    """The sources that read files, below all adapters."""
    if isinstance(source, SourceAdapter):
        for each in source.sources:
            yield from files_of(each)
    else:
        yield source


class Stages(SourceAdapter):
    """The stages of a pipeline, each with files of its own; of what several have, tied weights, the first one's counts.

    What all stages say alike is asked of the stage of the rank that reads.
    """

    def __init__(self, sources: Sequence[Source], near: int = 0) -> None:
        super().__init__(sources, near)
        self.count = len(sources)
        self._stage_of: dict[str, Source] = {}
        for source in sources:
            for name in source.shapes:
                known = self._stage_of.get(name)
                if known is None or (len(source.kinds(name)) > len(known.kinds(name))):
                    self._stage_of[name] = source
        self.format = f"{self.format}, {self.count} pipeline stages"
        self.shapes = {name: source.shapes[name] for name, source in self._stage_of.items()}
        self.aliases = {alias: name for source in sources for alias, name in source.aliases.items()}

    @functools.cached_property
    def buffers(self) -> Mapping[str, Tensor]:
        return {name: tensor for source in self.sources for name, tensor in source.buffers.items()}

    @functools.cached_property
    def groups(self) -> Sequence[tuple[Sequence[str], Mapping[str, Any]]]:
        return [group for source in self.sources for group in source.groups]

    def _at(self, name: str) -> tuple[Source, str]:
        return self._stage_of.get(name) or self._stage_of.get(self.aliases.get(name, name)) or self._near, name


class Selection(SourceAdapter):
    """A source of which a rank of a pipeline sees what its own layers need."""

    def __init__(self, source: Source, holds: Callable[[str], bool]) -> None:
        super().__init__([source])
        self._holds = holds
        self.shapes = {name: shape for name, shape in source.shapes.items() if holds(name)}
        self.aliases = {alias: name for alias, name in source.aliases.items() if holds(alias)}

    @functools.cached_property
    def groups(self) -> Sequence[tuple[Sequence[str], Mapping[str, Any]]]:
        kept = [([name for name in names if self._holds(name)], settings) for names, settings in self._near.groups]
        return [(names, settings) for names, settings in kept if names]


# ---- slices of stacked experts


def slice_name(name: str, number: int) -> str:
    """What a slice of a parameter is called."""
    before, _, last = name.rpartition(".")
    return f"{before}.{_MARK}.{number}.{last}"


def with_slices(state: TrainingState) -> TrainingState:
    """The same state with its slices called by their numbers."""
    slices = {} if state.experts is None else state.experts.slices
    if not slices:
        return state
    names = {name: slice_name(name, number) for name, (number, _) in slices.items()}

    def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
        return {names.get(name, name): value for name, value in values.items()}

    return replace(
        state,
        module=renamed(state.module),
        groups=[replace(group, names=[names.get(name, name) for name in group.names]) for group in state.groups],
        frozen=renamed(state.frozen),
        aliases={names.get(alias, alias): names.get(name, name) for alias, name in state.aliases.items()},
    )


def slices_in(value: Any, where: object) -> dict[str, int]:
    """Of a file: parameter → into how many slices it is cut; anything else is a CheckpointError about `where`."""
    found = value or {}
    for name, count in found.items():
        if not isinstance(name, str) or "." not in name or type(count) is not int or not 1 <= count < _MOST:
            raise CheckpointError(f"{where}: {name!r:.100} is said to lie in {count!r:.100} slices")
    return dict(found)


class JoinedSlices(SourceAdapter):
    """A source in which parameters that lie in slices are whole."""

    def __init__(self, source: Source, slices: Mapping[str, int]) -> None:
        """`slices`: parameter → into how many it is cut."""
        super().__init__([source])
        self._slices = slices
        self._wholes = {slice_name(name, part): name for name, count in slices.items() for part in range(count)}
        for name, count in slices.items():
            shapes = {source.shapes.get(slice_name(name, part)) for part in range(count)}
            if len(shapes) != 1 or not all(shapes):
                raise CheckpointError(f"{name} lies in {count} slices, of which the checkpoint has {shapes}: not whole")
        whole = self._wholes
        self.shapes = {
            whole.get(name, name): torch.Size((shape[0] * slices[whole[name]], *shape[1:])) if name in whole else shape
            for name, shape in source.shapes.items()
        }
        self.aliases = {whole.get(alias, alias): whole.get(name, name) for alias, name in source.aliases.items()}

    @functools.cached_property
    def groups(self) -> Sequence[tuple[Sequence[str], Mapping[str, Any]]]:
        whole = self._wholes
        return [
            (list(dict.fromkeys(whole.get(name, name) for name in names)), settings)
            for names, settings in self._near.groups
        ]

    def _at(self, name: str) -> tuple[Source, str]:
        name = self.aliases.get(name, name)
        return self._near, slice_name(name, 0) if name in self._slices else name

    def find(self, name: str, kind: str, start: int = 0, stop: int | None = None) -> list[StoredPart]:
        name = self.aliases.get(name, name)
        if name not in self._slices:
            return self._near.find(name, kind, start, stop)
        numel = self._near.shapes[slice_name(name, 0)].numel()
        stop = numel * self._slices[name] if stop is None else stop
        parts: list[StoredPart] = []
        for part in range(start // max(numel, 1), -(-stop // max(numel, 1))):
            low, high = max(start - part * numel, 0), min(stop - part * numel, numel)
            parts += self._near.find(slice_name(name, part), kind, low, high)
        return parts


# ---- tensor-parallel slices


def plain_splits(splits: Mapping[str, DimSplit]) -> dict[str, Any]:
    """For a file: name → [dim, intervals by rank]."""
    return {
        name: [split.dim, [[list(part) for part in parts] for parts in split.parts]] for name, split in splits.items()
    }


def splits_in(value: Any, where: object) -> dict[str, DimSplit]:
    """What `plain_splits` wrote; gaps, and overlaps that are no copies, are a CheckpointError about `where`."""
    found = {}
    for name, entry in (value or {}).items():
        try:
            dim, parts = entry
            split = DimSplit(dim, tuple(tuple((start, stop) for start, stop in part) for part in parts))
            pieces = sorted({piece for part in split.parts for piece in part})
            numbers = [dim, *(number for piece in pieces for number in piece)]
            fine = all(type(number) is int and 0 <= number < 2**40 for number in numbers) and len(pieces) < _MOST
            ends = [0, *(stop for _, stop in pieces)]
            fine = fine and dim < 64 and [start for start, _ in pieces] == ends[:-1] and bool(pieces)
            fine = fine and all(len(set(part)) == len(part) for part in split.parts)
        except (TypeError, ValueError):
            fine = False
        if not fine or not isinstance(name, str):
            raise CheckpointError(f"{where}: how {name!r:.100} is cut over ranks is not readable: {entry!r:.100}")
        found[name] = split
    return found


class Resliced(SourceAdapter):
    """Slices for rank `rank` of other slices; `wanted` is empty for whole tensors.

    What is cut in either of them is read as a whole part of each file that holds some of it; the rest is found as in
    the first source.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        saved: Mapping[str, DimSplit],
        wanted: Mapping[str, DimSplit],
        rank: int = 0,
        *,
        same_ranks: bool = False,
    ) -> None:
        """`same_ranks`: a rank is the one that wrote what it reads, so that random states are its own."""
        super().__init__(sources)
        self._same_ranks = same_ranks
        self._saved, self._wanted, self._rank = saved, wanted, rank
        for name, split in saved.items():
            if split.ranks != len(sources):
                raise CheckpointError(
                    f"{name} was cut over {split.ranks} tensor-parallel ranks, but there are files of {len(sources)}: "
                    "the checkpoint is not whole"
                )
        self.shapes = {name: self._local_shape(name, shape) for name, shape in self._near.shapes.items()}
        self.format += f", of {len(sources)} tensor-parallel ranks" if len(sources) > 1 else ""

    def _local_shape(self, name: str, shape: torch.Size) -> torch.Size:
        whole = self._saved[name].whole_shape(shape) if name in self._saved else tuple(shape)
        wanted = self._wanted.get(name)
        if wanted is None or wanted.dim >= len(whole) or wanted.total != whole[wanted.dim]:
            return torch.Size(whole)  # of another size than the model's: the comparison of shapes finds it
        return torch.Size(wanted.shape(whole, self._rank))

    def find(self, name: str, kind: str, start: int = 0, stop: int | None = None) -> list[StoredPart]:
        """Where the flat elements [start, stop) of the wanted rank's part are; of a cut tensor a copy."""
        owner = self.aliases.get(name, name)
        if owner not in self._saved and owner not in self._wanted:
            return self._near.find(name, kind, start, stop)
        if owner not in self._saved and (run := self._run(owner)) is not None:
            last = run[1] if stop is None else run[0] + stop
            return self._near.find(name, kind, run[0] + start, last)
        flat = self._part(owner, kind).reshape(-1)
        return [StoredPart(flat[start:stop].clone(), _IN_MEMORY)]

    def rank_state(self, rank: int) -> Mapping[str, Any]:
        """The place in the data; random states belong to the ranks that wrote them."""
        found = self._near.rank_state(rank)
        if self._same_ranks:
            return found
        return {"data": found["data"]} if found.get("data") else {}

    def _run(self, name: str) -> tuple[int, int] | None:
        """The elements of a whole tensor that the wanted rank has, if they lie one behind the other."""
        wanted, shape = self._wanted[name], self._near.shapes[name]
        if wanted.dim or self.shapes[name] == shape or len(wanted.parts[self._rank]) != 1:
            return None
        ((start, stop),) = wanted.parts[self._rank]
        row = shape[1:].numel()
        return start * row, stop * row

    def _part(self, name: str, kind: str) -> Tensor:
        saved, wanted = self._saved.get(name), self._wanted.get(name)
        if saved is None:
            whole = self._near.read(name, kind).view(self._near.shapes[name])
        else:
            parts = [source.read(name, kind).view(source.shapes[name]) for source in self.sources]
            self._check(name, saved, parts)
            whole = saved.join(parts)
        if wanted is None or self.shapes[name] == whole.shape:
            return whole
        return wanted.cut(whole, self._rank)

    def _check(self, name: str, saved: DimSplit, parts: Sequence[Tensor]) -> None:
        whole = saved.whole_shape(parts[0].shape) if saved.dim < parts[0].dim() else ()
        for rank, part in enumerate(parts):
            if not whole or tuple(part.shape) != saved.shape(whole, rank):
                raise CheckpointError(
                    f"{name}: the part of tensor-parallel rank {rank} has the shape {tuple(part.shape)}, which does "
                    "not fit how it was cut: the file is damaged or belongs to another checkpoint"
                )


_IN_MEMORY = Opened(None, require=lambda tensor: tensor, place=lambda tensor: None)
"""Parts that are put together from several files, each checked when it was read."""


_PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def state_of(source: Source, *, stage: int, rank: int, world: int) -> TrainingState:
    """What `rank` of `world` would hold at a stage; only its own part is read."""
    groups = [_group(source, names, settings, stage, rank, world) for names, settings in source.groups]
    trained = {name for group in groups for name in group.names}
    kept = source.shapes
    frozen = {name: shape for name, shape in kept.items() if name not in trained and name not in source.buffers}
    if not groups and any("exp_avg" in source.kinds(name) for name in kept):
        raise CheckpointError("the checkpoint's optimizer state cannot be converted: its groups are unknown")
    module: dict[str, Tensor] = {}
    dtypes = {}
    for name, shape in kept.items():
        dtypes[name] = source.dtype(name) or torch.float32
        module[name] = (
            source.buffers[name] if name in source.buffers else _weight(source, name, shape, stage, rank, world)
        )
    module.update({alias: module[owner] for alias, owner in source.aliases.items()})
    small = source.small
    widths = [dtypes[name] for name in trained] or list(dtypes.values())
    precision = next((_PRECISIONS[dtype] for dtype in widths if dtype in _PRECISIONS), "fp32")
    own = source.rank_state(rank) if world == source.world else {}
    return TrainingState(
        stage=stage,
        precision=precision,
        module=module,
        groups=groups,
        buffers=list(source.buffers),
        frozen=frozen,
        aliases=dict(source.aliases),
        extra=small.extra,
        dp_rank=rank,
        dp_size=world,
        counters=small.counters,
        loss_scale=small.loss_scale,
        overflow=small.overflow,
        clip=small.ds_config.get("gradient_clipping") if small.clip is None else small.clip,
        lr_scheduler=small.lr_scheduler,
        data=own.get("data"),
        pacing=own.get("pacing") or {},
        rng=own.get("rng"),
        client_state=small.client_state,
        ds_config=small.ds_config,
    )


def _weight(source: Source, name: str, shape: torch.Size, stage: int, rank: int, world: int) -> Tensor:
    dtype = source.dtype(name) or torch.float32
    if stage < 3:
        return source.read(name, "param").view(shape).to(dtype, copy=True)  # a view of a file holds on to all of it
    start, stop = StripedLayout((shape.numel(),), world).interval(0, rank)
    return source.read(name, "param", start, stop).to(dtype, copy=True)


def _group(
    source: Source, names: Sequence[str], settings: Mapping[str, Any], stage: int, rank: int, world: int
) -> GroupState:
    shapes = [source.shapes[name] for name in names]
    numels = tuple(shape.numel() for shape in shapes)
    layouts: Mapping[int, FlatLayout | None] = {0: None, 3: StripedLayout(numels, world)}
    layout = layouts.get(stage, ContiguousLayout(numels, world))
    tensors: dict[str, list[Tensor | None]] = {"master": []}
    for index, name in enumerate(names):
        start, stop = layout.interval(index, rank) if layout is not None else (0, numels[index])
        available = set(source.kinds(name)) - {"param"}
        for kind in (*tensors, *sorted(available - tensors.keys())):
            column = tensors.setdefault(kind, [None] * index)
            column.append(_part(source, name, kind, start, stop) if kind in available else None)
    scalars = [source.scalars(name) for name in names]
    return GroupState(list(names), shapes, tensors, scalars, dict(settings), layout, rank)


def _part(source: Source, name: str, kind: str, start: int, stop: int) -> Tensor | None:
    if start == stop:
        return None
    part = source.read(name, kind, start, stop)
    return part.float() if kind == "master" else part
