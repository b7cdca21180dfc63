"""`open_checkpoint`: a directory's format, found by the files that lie in it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.formats.adapters import JoinedSlices, Resliced, Stages
from deepspeed.checkpoint.formats.checked_files import Opened, Opener
from deepspeed.checkpoint.formats.guard import guarded, reading
from deepspeed.checkpoint.formats.native.reader import NativeSource
from deepspeed.checkpoint.formats.native.writer import INDEX
from deepspeed.checkpoint.formats.source import IntervalIndex, Small, Source, StoredInterval, StoredPart
from deepspeed.checkpoint.formats.zero_files.experts import layer_of
from deepspeed.checkpoint.formats.zero_files.file_names import CheckpointFiles, sort_files
from deepspeed.checkpoint.formats.zero_files.flat_writer import scaler_attributes
from deepspeed.checkpoint.formats.zero_files.reader import DeepSpeedSource, is_deepspeed
from deepspeed.checkpoint.storage.commit import LATEST, LATEST_UNIVERSAL
from deepspeed.checkpoint.storage.locate import read_latest
from deepspeed.errors import CheckpointError
from deepspeed.fragments import DimSplit
from deepspeed.trust import inside

OfRank = Callable[[int, bool], DeepSpeedSource | NativeSource]
"""What a model-parallel rank wrote, and whether a reader's own groups tell the order of parameters there."""


@dataclass(frozen=True, slots=True)
class ModelShare:
    """What a reader that is one of several model-parallel ranks holds of the model."""

    layers: Mapping[int, str] | None = None
    """Of a pipeline: the layers that have files, by number, and what their names begin with."""
    splits: Mapping[str, DimSplit] | None = None
    """How it holds tensors that it shares; None: all of them are whole."""


def open_checkpoint(
    directory: str | Path,
    *,
    mp_rank: int = 0,
    order: Sequence[Sequence[str]] | None = None,
    verify: bool = True,
    partial: bool = False,
    near: int = 0,
    share: ModelShare = ModelShare(),
) -> Source:
    """The checkpoint in a tag's directory.

    `order`: the names in each parameter group of the optimizer, which only stage 0 of DeepSpeed itself needs.
    `verify`: compare what is read with the manifest, where there is one. `partial`: files of other ranks may be absent,
    because they lie on other nodes. `near`: the data-parallel rank that reads, whose own files are preferred. `share`:
    what the reader, which is model-parallel rank `mp_rank`, holds; slices in the files are put together where they
    tell how they belong together.
    """
    layers, splits = share.layers, share.splits
    path = Path(directory)
    if not path.is_dir():
        raise CheckpointError(f"{path} is no directory")
    if (path / INDEX).exists():
        return _open_native(path, Opener(path, verify=verify), mp_rank, share)
    if (path / "zero").is_dir():
        own = mp_rank if layers is None and not splits else 0  # stages and slices were put together
        return _cut(UniversalSource(path, own, opener=Opener(path, verify=verify)), splits, mp_rank)
    with reading(path):
        names = sorted(entry.name for entry in path.iterdir())
    if is_deepspeed(found := sort_files(names)):
        opener = Opener(path, verify=verify)
        with reading(path):
            stages, slices = _dimensions(found, opener)

        def of_rank(rank: int, reads_order: bool = True) -> DeepSpeedSource:
            return DeepSpeedSource(
                path,
                rank,
                order if reads_order else None,
                opener=opener,
                partial=partial,
                near=near,
                layers=layers if stages > 1 else None,
            )

        if stages == 1:  # a rank of a pipeline reads what all stages have
            place = mp_rank if layers is None else mp_rank % (_ranks_of(splits) or slices)
            return _of_ranks(of_rank, found.model_ranks, splits, place)
        return _of_stages(of_rank, (stages, slices), splits, mp_rank)
    raise CheckpointError(
        f"{path} holds no checkpoint; it has {', '.join(names[:5]) or 'nothing'}. Expected DeepSpeed's "
        f"*_model_states.pt, a universal checkpoint's zero/, or {INDEX}"
    )


def _open_native(path: Path, opener: Opener, mp_rank: int, share: ModelShare) -> Source:
    first = NativeSource(path, opener=opener)
    stages, slices = first.dimensions
    if stages * slices == 1:
        return _cut(_joined(first), share.splits, mp_rank)

    def of_rank(rank: int, reads_order: bool = True) -> NativeSource:
        return NativeSource(path, rank, opener=opener)

    if stages == 1:
        return _of_ranks(of_rank, range(slices), share.splits, mp_rank % (_ranks_of(share.splits) or slices))
    return _of_stages(of_rank, (stages, slices), share.splits, mp_rank)


def _of_stages(
    of_rank: OfRank, dimensions: tuple[int, int], splits: Mapping[str, DimSplit] | None, mp_rank: int
) -> Stages:
    """What all stages have, of which the reader may be one; each with its slices put together."""
    stages, slices = dimensions
    mine, place = divmod(mp_rank, _ranks_of(splits) or slices)

    def of_stage(stage: int) -> Source:
        first = stage * slices
        return _joined(_of_ranks(lambda part: of_rank(first + part, stage == mine), range(slices), splits, place))

    return Stages([of_stage(stage) for stage in range(stages)], mine)


def _dimensions(found: CheckpointFiles, opener: Opener) -> tuple[int, int]:
    """(stages, tensor slices) of what wrote a checkpoint."""
    first = found.models.get(0) or found.sharded_models.get((0, 0))
    state = opener.torch(first, shared=True).state if first is not None else None
    told = state.get("checkpoint_parallel_dimensions") if isinstance(state, Mapping) else None
    files = max(1, len(found.models) or len({mp for _, mp in found.sharded_models}))
    stages, slices = (told.get("pp_degree"), told.get("tp_degree")) if isinstance(told, Mapping) else (1, 1)
    if not isinstance(stages, int) or not isinstance(slices, int) or stages < 1 or slices < 1:
        raise CheckpointError(f"{opener.directory}: {first} tells of {stages!r} stages with {slices!r} slices each")
    if stages == 1 and found.layers:
        stages = files // slices
    if stages > 1 and stages * slices > files:
        raise CheckpointError(
            f"{opener.directory} was written by {stages} stages with {slices} slices each, but has model files of "
            f"{files} only"
        )
    return stages, slices


def _cut(source: Source, splits: Mapping[str, DimSplit] | None, rank: int) -> Source:
    return Resliced([source], {}, splits, rank % _ranks_of(splits)) if splits else source


def _ranks_of(splits: Mapping[str, DimSplit] | None) -> int:
    """Over how many ranks a reader's tensors are cut; 0 if they are not."""
    return next(iter(splits.values())).ranks if splits else 0


def _joined(source: Source) -> Source:
    """With experts whole of which the ranks that wrote had slices."""
    slices = source.slices if isinstance(source, (DeepSpeedSource, NativeSource)) else {}
    return JoinedSlices(source, slices) if slices else source


def _of_ranks(
    of_rank: Callable[[int], DeepSpeedSource | NativeSource],
    written: Sequence[int],
    splits: Mapping[str, DimSplit] | None,
    mp_rank: int,
) -> Source:
    """The files of the reader's own rank where it cuts as they do; else those of all ranks, put together."""
    own = of_rank(mp_rank if mp_rank in written or not (splits or len(written) > 1) else written[0])
    saved = own.splits
    if len(written) > 1 and saved is None:
        if splits and len(written) != next(iter(splits.values())).ranks:
            raise CheckpointError(
                f"the checkpoint was written by {len(written)} model-parallel ranks and does not tell how it cut "
                f"tensors, so that {next(iter(splits.values())).ranks} cannot read it. Load it with as many ranks "
                "and save it anew"
            )
        return _joined(own)
    if (not splits and not saved) or (splits and saved is not None and _alike(saved, splits, own)):
        return _joined(own)
    return Resliced([_joined(of_rank(rank)) for rank in written], saved or {}, splits or {}, mp_rank)


def _alike(saved: Mapping[str, DimSplit], splits: Mapping[str, DimSplit], own: Source) -> bool:
    """Whether a reader cuts as the files do; of experts it names those that it has."""
    layers = {layer_of(name) for name in splits} - {None}
    elsewhere = {name for name in saved if name not in splits and layer_of(name) in layers}
    names = {*saved, *splits, *own.aliases} - elsewhere
    return all(saved.get(name) == splits.get(name) for name in names)


def find_tag(directory: str | Path, tag: str | None = None) -> Path:
    """The tag's directory: of `tag`, of `latest` or `latest_universal`, or `directory` itself where it is one."""
    path = Path(directory)
    pointer = next((name for name in (LATEST, LATEST_UNIVERSAL) if (path / name).exists()), LATEST)
    named = read_latest(path, pointer) if tag is None else tag
    found = path if named is None else inside(path, named, "the tag" if tag is not None else f"{path / pointer} names")
    if not found.is_dir():
        known = sorted(entry.name for entry in path.iterdir() if entry.is_dir()) if path.is_dir() else []
        raise CheckpointError(f"{found} does not exist; {path} has {', '.join(known[:20]) or 'no tags'}")
    return found


@guarded
class UniversalSource(Source):
    """A directory with `zero/<name>/<kind>.pt` and the model files of the run, which hold buffers and counters."""

    def __init__(self, directory: Path, mp_rank: int = 0, *, opener: Opener | None = None) -> None:
        self._directory = directory
        self._opener = opener or Opener(directory)
        self._base = DeepSpeedSource(directory, mp_rank, opener=self._opener)
        self.world = self._base.world
        self.buffers = self._base.buffers
        self.stage = 3 if any(name.startswith("zero_pp_rank") for name in self._base.files) else 2  # of the model files
        self.format = f"universal, from DeepSpeed {self._base.small.version}"
        self._pieces = IntervalIndex(str(directory), dict(self._base.aliases), dict(self._base.shapes))
        self.shapes, self.aliases = self._pieces.shapes, self._pieces.aliases
        self._steps: dict[str, Path] = {}
        # Then the model files have slices, and what lies here was put together of them.
        self._sliced = sum(name.startswith("mp_rank_") for name in self._base.files) > 1
        for folder in sorted(path for path in (directory / "zero").iterdir() if path.is_dir()):
            if folder.name not in self._base.buffers and folder.name not in self._pieces.aliases:
                self._enter(folder)

    @functools.cached_property
    def files(self) -> Sequence[str]:
        inside = sorted(str(path.relative_to(self._directory)) for path in (self._directory / "zero").rglob("*.pt"))
        return (*self._base.files, *inside)

    @functools.cached_property
    def groups(self) -> Sequence[tuple[Sequence[str], Mapping[str, Any]]]:
        shapes = self._base.model_entries.get("param_shapes") or []
        inner = self._state.get("optimizer_state_dict")
        found = inner["param_groups"] if isinstance(inner, Mapping) else self._state.get("param_groups") or []
        by_parameter = self.stage == 3 and all("params" in group for group in found)
        members = [group["params"] if by_parameter else [place] for place, group in enumerate(found)]
        if sorted(flat for flats in members for flat in flats) != list(range(len(shapes))):
            return []
        return [
            ([name for flat in flats for name in shapes[flat]], {k: v for k, v in group.items() if k != "params"})
            for flats, group in zip(members, found, strict=True)
        ]

    @functools.cached_property
    def small(self) -> Small:
        small, state = self._base.small, self._state
        scale = small.loss_scale or state.get("loss_scale") or scaler_attributes(state.get("loss_scaler"))
        clip = state.get("clip_grad") if small.clip is None else small.clip
        return dataclasses.replace(small, loss_scale=scale, clip=clip)

    def kinds(self, name: str) -> tuple[str, ...]:
        return self._pieces.kinds(name) or self._base.kinds(name)

    def dtype(self, name: str) -> torch.dtype | None:
        return self._base.dtype(name)

    def find(self, name: str, kind: str, start: int = 0, stop: int | None = None) -> list[StoredPart]:
        if self._pieces.owner(name) not in self._pieces.index:
            return self._base.find(name, kind, start, stop)
        return self._pieces.find(name, kind, start, stop)

    def scalars(self, name: str) -> Mapping[str, Any]:
        owner = self._pieces.owner(name)
        if owner in self._steps:
            return {"step": self._object(self._steps[owner])}
        states = (self._state.get("optimizer_state_dict") or {}).get("state") or {}
        if "exp_avg" not in self.kinds(owner) or "step" not in states.get(0, {}):
            return {}
        return {"step": states[0]["step"]}

    @functools.cached_property
    def _state(self) -> Mapping[str, Any]:
        path = self._directory / "zero" / "optimizer_state.pt"
        found: Mapping[str, Any] = self._object(path) if path.exists() else {}
        return found

    def _enter(self, folder: Path) -> None:
        name = folder.name
        for path in sorted(folder.glob("*.pt"), key=lambda path: (path.stem != "fp32", path.name)):
            kind = "master" if path.stem == "fp32" else path.stem
            if kind == "step":
                self._steps[name] = path
                continue
            if name not in self._pieces.shapes or (self._sliced and kind == "master"):
                self._pieces.shapes[name] = self._tensor(path)[0].shape
            numel = self._pieces.shapes[name].numel()
            load = functools.partial(self._tensor, path)
            self._pieces.add(name, kind, StoredInterval((0, numel), load, 0, str(path)))

    def _object(self, path: Path) -> Any:
        """A small file, checked as a whole."""
        opened = self._opener.torch(str(path.relative_to(self._directory)))
        return opened.checked(opened.state)

    def _tensor(self, path: Path) -> tuple[Tensor, Opened]:
        opened = self._opener.torch(str(path.relative_to(self._directory)))
        found = opened.state
        tensor = found.get("param") if isinstance(found, Mapping) else found
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{path} holds {type(found).__name__}, expected a tensor or {{'param': tensor}}")
        return tensor, opened
