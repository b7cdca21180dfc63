"""The topology-free format as a `Source`: the index says which rank's file holds an interval, headers say where."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.formats.adapters import slices_in, splits_in
from deepspeed.checkpoint.formats.checked_files import Opened, Opener
from deepspeed.checkpoint.formats.guard import dtype_called, guarded, rank_count, shape_of
from deepspeed.checkpoint.formats.native.writer import VERSIONS, fragment_file, index_file, rank_file, small_file
from deepspeed.checkpoint.formats.safetensors import TensorFile
from deepspeed.checkpoint.formats.source import IntervalIndex, Small, Source, StoredInterval, with_both
from deepspeed.checkpoint.formats.training_state import Counters
from deepspeed.checkpoint.formats.values import decode
from deepspeed.checkpoint.formats.zero_files.experts import ExpertLayers, renumbered
from deepspeed.errors import CheckpointError
from deepspeed.fragments import ContiguousLayout, DimSplit, FlatLayout, StripedLayout
from deepspeed.trust import flaw_of_name


@guarded
class NativeSource(Source):
    """What one model-parallel rank wrote: an index, and one safetensors file per data-parallel rank."""

    def __init__(self, directory: Path, mp_rank: int = 0, *, opener: Opener | None = None) -> None:
        self._directory, self._mp_rank = directory, mp_rank
        self._opener = opener or Opener(directory)
        self._path = directory / index_file(mp_rank)
        self._index = _read_index(self._path, self._opener.text(self._path.name))
        self.format = f"fragments (safetensors), written by {self._index['ds_version']}"
        self.stage = int(self._index["stage"])
        self.world = int(self._index["ranks"])
        self.copies = rank_count(self._index.get("copies", 1), self._path)
        self._pieces = IntervalIndex(str(directory), dict(self._index["aliases"]))
        self.shapes, self.aliases = self._pieces.shapes, self._pieces.aliases
        self._dtypes: dict[str, str | None] = {}
        self._holder: dict[str, int] = {}
        self._scalars: dict[int, dict[str, dict[str, Any]]] = {}
        self._experts = self._expert_layers()
        for group in self._index["groups"]:
            self._enter(group["tensors"], self._layout(group), group["kinds"], group.get("ep", 0))
        for fixed in (self._index["frozen"], *self._expert_entries.get("fixed", ())):
            layout = self._layout({**fixed, "align": 1, "gap": 1})
            self._enter(fixed["tensors"], layout, ["param"], fixed.get("ep", 0))
        self._enter(self._index["buffers"], None, ["param"])
        self._pieces.sort(self._index["order"])

    @functools.cached_property
    def dimensions(self) -> tuple[int, int]:
        """(pipeline stages, tensor slices) of what wrote the checkpoint."""
        ranks = rank_count(self._index.get("model_parallel_ranks", 1), self._path)
        stages = rank_count(self._index.get("pipeline_stages", 1), self._path)
        if ranks % stages:
            raise CheckpointError(f"{self._path}: {ranks} model-parallel ranks do not make {stages} stages")
        return stages, ranks // stages

    @functools.cached_property
    def splits(self) -> Mapping[str, DimSplit] | None:
        """How tensors are cut over the slices; None where the index does not tell."""
        if "splits" not in self._index:
            return None
        found = splits_in(self._index["splits"], self._path)
        return found if self._experts is None else self._experts.everywhere(found)

    @functools.cached_property
    def files(self) -> Sequence[str]:
        stages, slices = self.dimensions
        ranks = range(stages * slices)
        shared = [name for rank in ranks for name in (index_file(rank), small_file(rank))]
        parts = [fragment_file(part, rank) for rank in ranks for part in range(self.world)]
        own = [rank_file(part, rank) for rank in ranks for part in range(self.writers)]
        return (*shared, *parts, *(name for name in own if (self._directory / name).exists()))

    @functools.cached_property
    def buffers(self) -> Mapping[str, Tensor]:
        return {name: self.read(name, "param").view(self._pieces.shapes[name]) for name in self._index["buffers"]}

    @functools.cached_property
    def groups(self) -> Sequence[tuple[Sequence[str], Mapping[str, Any]]]:
        settings = self._small_entries["hyperparameters"]
        return [
            (self._listed(group), settings[place] if place < len(settings) else {})
            for place, group in enumerate(self._index["groups"])
        ]

    @functools.cached_property
    def slices(self) -> Mapping[str, int]:
        """Parameters of experts that lie in slices → in how many."""
        return slices_in(self._expert_entries.get("slices"), self._directory)

    @functools.cached_property
    def small(self) -> Small:
        found = self._small_entries
        return Small(
            Counters(**found["counters"]),
            found["lr_scheduler"],
            found["loss_scale"],
            found["overflow"],
            found["clip"],
            decode(found["client_state"]),
            found["ds_config"],
            self._index["ds_version"],
            found.get("module") or {},
        )

    def kinds(self, name: str) -> tuple[str, ...]:
        """What can be read of a parameter: what the file of its first elements has."""
        owner = self._pieces.owner(name)
        if owner not in self._holder:
            return ()
        held = self._open(self._holder[owner]).state.tensors
        return with_both(kind for kind in self._pieces.kinds(owner) if f"{kind}:{owner}" in held)

    def dtype(self, name: str) -> torch.dtype | None:
        return dtype_called(self._dtypes.get(self._pieces.owner(name)))

    def scalars(self, name: str) -> Mapping[str, Any]:
        owner = self._pieces.owner(name)
        if owner not in self._holder:
            return {}
        rank = self._holder[owner]
        opened = self._open(rank)
        if rank not in self._scalars:
            self._scalars[rank] = _scalars(opened.state)
        return opened.checked(self._scalars[rank].get(owner, {}))

    def rank_state(self, rank: int) -> Mapping[str, Any]:
        name = rank_file(rank, self._mp_rank)
        return self._small_object(name) if (self._directory / name).exists() else {}

    @functools.cached_property
    def _small_entries(self) -> Mapping[str, Any]:
        return self._small_object(small_file(self._mp_rank))

    def _small_object(self, name: str) -> Mapping[str, Any]:
        opened = self._opener.torch(name)
        found: Mapping[str, Any] = opened.checked(opened.state)
        return found

    @property
    def _expert_entries(self) -> Mapping[str, Any]:
        return self._index.get("experts") or {}

    def _expert_layers(self) -> ExpertLayers | None:
        told = self._expert_entries
        if not told:
            return None
        layers = {str(layer): rank_count(count, self._path) for layer, count in told["layers"].items()}
        return ExpertLayers(layers, self.world, bool(told["data_first"]))

    def _layout(self, group: Mapping[str, Any]) -> FlatLayout:
        numels = tuple(shape_of(shape, self._directory).numel() for shape, _ in group["tensors"].values())
        ep = group.get("ep", 0)
        world = self._spread(ep).grid(ep).edp if ep else self.world
        if group["split"] == "each":
            return StripedLayout(numels, world)
        return ContiguousLayout(numels, world, align=group["align"], gap=group["gap"])

    def _spread(self, ep: Any) -> ExpertLayers:
        if self._experts is None or rank_count(ep, self._path) > self.world:
            raise CheckpointError(f"{self._path}: experts on {ep!r:.100} of {self.world} ranks: which?")
        return self._experts

    def _listed(self, group: Mapping[str, Any]) -> list[str]:
        """The names of a group, of whichever rank."""
        ep = group.get("ep", 0)
        parts = range(max(ep, 1))
        return [self._name(listed, ep, part) for part in parts for listed in group["tensors"]]

    def _name(self, listed: str, ep: int, part: int) -> str:
        return renumbered(listed, self._spread(ep).shift(listed, ep, part)) if ep else listed

    def _enter(self, tensors: Mapping[str, Any], layout: FlatLayout | None, kinds: Sequence[str], ep: int = 0) -> None:
        """Tensors that `layout` cuts; experts that are spread over `ep` ranks as the first of them lists its own."""
        if not isinstance(kinds, list) or len(set(kinds)) != len(kinds) or not all(isinstance(k, str) for k in kinds):
            raise CheckpointError(f"{self._path}: {kinds!r:.100} are no kinds of tensors")
        for part in range(max(ep, 1)):
            for number, (listed, (shape, dtype)) in enumerate(tensors.items()):
                name = self._name(listed, ep, part)
                if name in self._pieces.shapes:
                    raise CheckpointError(f"{self._path} lists {name!r:.200} twice")
                size = shape_of(shape, f"{self._directory}: {name}")
                self._pieces.shapes[name] = size
                self._dtypes[name] = dtype
                for copy in range(layout.world if layout else 1):
                    interval = layout.interval(number, copy) if layout else (0, size.numel())
                    rank = self._spread(ep).grid(ep).rank(part, copy) if ep else copy
                    if interval[0] < interval[1] or (size.numel() == 0 and copy == 0):
                        self._add(name, kinds, interval, rank)

    def _add(self, name: str, kinds: Sequence[str], interval: tuple[int, int], rank: int) -> None:
        self._holder.setdefault(name, rank)
        for kind in kinds:
            load = functools.partial(self._load, rank, kind, name, interval)
            self._pieces.add(name, kind, StoredInterval(interval, load, 0, self._index["files"][rank]))

    def _load(self, rank: int, kind: str, name: str, interval: tuple[int, int]) -> tuple[Tensor, Opened]:
        opened = self._open(rank)
        tensor = opened.state.tensors.get(f"{kind}:{name}")
        file = self._index["files"][rank]
        if tensor is None:
            raise CheckpointError(f"{self._directory / file} has no {kind} of {name}; the index says it has")
        if tensor.numel() != interval[1] - interval[0]:
            raise CheckpointError(
                f"{self._directory / file}: {kind} of {name} has {tensor.numel()} elements, expected "
                f"{interval[1] - interval[0]} ([{interval[0]}, {interval[1]}) of it)"
            )
        return tensor, opened

    def _open(self, rank: int) -> Opened:
        return self._opener.tensors(self._index["files"][rank])


def _scalars(content: TensorFile) -> dict[str, dict[str, Any]]:
    """By parameter: the numbers of the header and the tensors that stand for one."""
    found: dict[str, dict[str, Any]] = json.loads(content.metadata.get("scalars", "{}"))
    for key, tensor in content.tensors.items():
        if key.startswith("scalar:"):
            _, kind, name = key.split(":", 2)
            found.setdefault(name, {})[kind] = tensor
    return found


def _read_index(path: Path, text: str) -> Mapping[str, Any]:
    try:
        index: Mapping[str, Any] = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}): the checkpoint is damaged") from error
    if not isinstance(index, dict):
        raise CheckpointError(f"{path} holds {type(index).__name__}, expected an object: the checkpoint is damaged")
    if index.get("format") != "deepspeed-fragments" or index.get("version") not in VERSIONS:
        raise CheckpointError(
            f"{path}: format {index.get('format')!r}, version {index.get('version')!r}; this version reads "
            f"'deepspeed-fragments', version {' or '.join(map(str, VERSIONS))}"
        )
    world, files = rank_count(index.get("ranks"), path), index.get("files")
    if not isinstance(files, list) or len(files) != world or any(flaw_of_name(name) for name in files):
        raise CheckpointError(f"{path}: 'files' has to name a file inside the folder for each of {world} ranks")
    return index
