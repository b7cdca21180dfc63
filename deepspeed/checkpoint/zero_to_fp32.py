#!/usr/bin/env python
"""Makes one ordinary state dict of a ZeRO checkpoint; needs torch only, so that it can lie beside the checkpoint.

    python zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR [--safe_serialization] [--max_shard_size 5GB] [--tag TAG]

Works at every stage, keeps frozen and tied parameters, and holds one tensor in memory at a time.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import pickle
import re
import secrets
import stat
import sys
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

__all__ = [
    "DTYPES", "Checkpoint", "Lazy", "Plan", "check_output", "find_tag", "main", "natural", "parse_size", "plan_shards",
    "read_checkpoint", "write_shards",
]  # fmt: skip

DTYPES = {
    "fp32": torch.float32, "float32": torch.float32, "fp16": torch.float16, "float16": torch.float16,
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
}  # fmt: skip
_SAFE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_REOPEN = 256 * 2**20
_Part = tuple[Path, tuple[Any, ...], int, int]  # file, entry, from, to


class _Value:
    """Takes the place of classes in DeepSpeed's files, whose content is not needed here."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _load(path: Path) -> dict[str, Any]:
    """Read a file through a memory map, admitting no class but stand-ins for DeepSpeed's own and its users' values."""
    ours = ("runtime.fp16.loss_scaler.LossScaler", "runtime.fp16.loss_scaler.DynamicLossScaler",
            "runtime.zero.config.ZeroStageEnum", "utils.tensor_fragment.fragment_address")  # fmt: skip
    others = ("argparse.Namespace", "datetime.datetime", "datetime.date", "datetime.timedelta", "pathlib.PosixPath",
              "pathlib.PurePosixPath", "decimal.Decimal", "uuid.UUID")  # fmt: skip
    names = (*(f"deepspeed.{name}" for name in ours), *others)
    stand_ins: list[Any] = [(type(name, (_Value,), {}), name) for name in names]
    zipped = _looked_at(path)
    with torch.serialization.safe_globals(stand_ins):
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped or None)
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {type(found).__name__}, expected a dict: it is no file of DeepSpeed")
    return found


def _looked_at(path: Path) -> bool:
    """Whether a regular file is a zip file; nothing of it may be compressed, since that unpacks to anything."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # not to wait for who writes to a pipe
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path} is not a regular file")
        size, zipped = os.fstat(descriptor).st_size, file.read(4) == b"PK\x03\x04"
        if zipped:
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
            packed = any(m.compress_type != zipfile.ZIP_STORED or m.compress_size != m.file_size for m in members)
            if packed or sum(m.file_size for m in members) > size or archive.comment:
                raise ValueError(f"{path} has members that are compressed or overlap: it is no file of torch.save")
    return zipped


def _shape(value: Any, name: object) -> torch.Size:
    fine = isinstance(value, (list, tuple)) and all(type(n) is int and n >= 0 for n in value)
    if not fine or math.prod(value) > 2**60:
        raise ValueError(f"{name!r:.200} has the shape {value!r:.100}, which no tensor has")
    return torch.Size(value)


def _plain_name(name: Any) -> bool:
    """Whether a tag stays inside the folder that it is looked for in."""
    parts = name.split("/") if isinstance(name, str) else [""]
    return not (name in ("", ".") or "\0" in name or name.startswith("/") or ".." in parts or len(name) > 4096)


class _Reader:
    """Opens files, and again after some reading: the pages of a memory map stay with the process until it is closed."""

    def __init__(self) -> None:
        self._open: dict[Path, dict[str, Any]] = {}
        self._read = 0

    def copy(self, part: _Part, out: Tensor) -> None:
        _, _, start, stop = part
        out.copy_(self.find(part).reshape(-1)[start:stop])
        self._read += out.nbytes
        if self._read > _REOPEN:
            self._open, self._read = {}, 0

    def find(self, part: _Part) -> Tensor:
        """The tensor in which a part lies, of which nothing is read yet; it has as many elements as memory."""
        path, keys, start, stop = part
        if path not in self._open:
            self._open[path] = _load(path)
        value: Any = self._open[path]
        for key in keys:
            value = value[key]
        what = f"{path}: {'/'.join(map(str, keys))}"
        if not isinstance(value, Tensor) or value.layout is not torch.strided or value.device.type != "cpu":
            raise ValueError(f"{what} is no ordinary tensor")
        if not 0 <= start <= stop <= value.numel() or value.nbytes > max(value.untyped_storage().nbytes(), 2**20):
            raise ValueError(f"{what} has {value.numel()} elements, expected {stop}")
        return value


@dataclass(frozen=True)
class Lazy:
    """A tensor that is still in files: which part of which entry of which file, in order."""

    shape: torch.Size
    dtype: torch.dtype
    parts: tuple[_Part, ...]
    reader: _Reader = field(repr=False, compare=False)

    def contiguous(self) -> Tensor:
        """The tensor."""
        for part in self.parts:  # what a file claims is not believed before it is seen
            self.reader.find(part)
        if sum(part[3] - part[2] for part in self.parts) != self.shape.numel():
            raise ValueError(
                f"a tensor of shape {tuple(self.shape)} is not whole in {[p.name for p, *_ in self.parts]}"
            )
        whole, end = torch.empty(self.shape.numel(), dtype=self.dtype), 0
        for part in self.parts:
            begin, end = end, end + part[3] - part[2]
            self.reader.copy(part, whole[begin:end])
        return whole.view(self.shape)


@dataclass
class Checkpoint:
    """Every tensor by name, and which names are the same tensor as another."""

    tensors: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    stage: int = 0
    world: int = 1


def natural(path: Path) -> list[Any]:
    """Sorts rank 10 after rank 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)]


def find_tag(directory: Path, tag: str | None) -> Path:
    """The folder that holds the files."""
    if tag is None:
        latest = directory / "latest"
        if latest.is_file():
            with latest.open(encoding="utf-8") as file:
                tag = file.read(5000).strip()
        elif any(directory.glob("*_model_states.pt")):
            return directory
        else:
            raise ValueError(f"{latest} does not exist and no tag was given")
    if not _plain_name(tag):
        raise ValueError(f"the tag {tag!r:.200} does not name a folder inside {directory}")
    if not (directory / tag).is_dir():
        raise FileNotFoundError(f"{directory / tag} does not exist")
    return directory / tag


@dataclass(frozen=True)
class _Joined:
    """A tensor of which tensor-parallel ranks hold intervals of one dim."""

    parts: tuple[Lazy, ...]
    dim: int
    intervals: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def shape(self) -> torch.Size:
        first = self.parts[0].shape
        total = max(stop for part in self.intervals for _, stop in part)  # ranks may hold copies
        return torch.Size((*first[: self.dim], total, *first[self.dim + 1 :]))

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def contiguous(self) -> Tensor:
        """The tensor."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        for part, intervals in zip(self.parts, self.intervals, strict=True):
            values, sizes = part.contiguous(), [stop - start for start, stop in intervals]
            for (start, stop), piece in zip(intervals, values.split(sizes, self.dim), strict=True):
                whole.narrow(self.dim, start, stop - start).copy_(piece)
        return whole


def read_checkpoint(folder: Path, *, exclude_frozen: bool = False) -> Checkpoint:
    """Find where every tensor of the model is; nothing is read but the files' indices."""
    names = [path.name for path in folder.glob("*mp_rank_*_model_states.pt")]
    ranks = sorted({found[1] for name in names if (found := re.search(r"mp_rank_(\d+)", name))})
    if len(ranks) < 2:
        return _read_rank(folder, "*", exclude_frozen)[0]
    slices = _slices(folder, ranks)
    whole = _read_slices(folder, ranks[:slices], exclude_frozen)
    for first in range(slices, len(ranks), slices):  # the other stages of a pipeline
        stage = _read_slices(folder, ranks[first : first + slices], exclude_frozen)
        whole.tensors = {**whole.tensors, **{n: v for n, v in stage.tensors.items() if n not in whole.tensors}}
        whole.aliases = {**stage.aliases, **whole.aliases}
    return whole


def _slices(folder: Path, ranks: Sequence[str]) -> int:
    """How many of the model-parallel ranks share each layer; the others are further stages of a pipeline."""
    model = _load(sorted(folder.glob(f"*mp_rank_{ranks[0]}_model_states.pt"), key=natural)[0])
    told = model.get("checkpoint_parallel_dimensions")
    slices, stages = (told.get("tp_degree"), told.get("pp_degree")) if isinstance(told, Mapping) else (None, None)
    if not isinstance(slices, int) or not isinstance(stages, int):
        slices, stages = (1, len(ranks)) if _layers(folder) else (len(ranks), 1)
    if slices < 1 or slices * stages != len(ranks):
        raise ValueError(f"{folder} tells of {stages} stages of {slices} slices, but has files of {len(ranks)} ranks")
    return slices


def _layers(folder: Path) -> list[Path]:
    """The files of a pipeline's layers."""
    return [path for path in folder.glob("layer_*") if "_expert_" not in path.name]


def _read_slices(folder: Path, ranks: Sequence[str], exclude_frozen: bool) -> Checkpoint:
    """What ranks hold that share their layers."""
    read = [_read_rank(folder, rank, exclude_frozen, place, ranks) for place, rank in enumerate(ranks)]
    checkpoint, splits = read[0]
    if len(ranks) == 1:
        return checkpoint
    if splits is None:
        raise ValueError(f"{folder} is of {len(ranks)} model-parallel ranks and does not tell how they cut tensors")
    splits = _of_all_experts(splits, checkpoint.tensors)
    for name in [name for name in checkpoint.tensors if name in splits]:
        absent = [rank for rank, (found, _) in zip(ranks, read, strict=True) if name not in found.tensors]
        if absent:
            raise ValueError(f"{folder}: {name} is cut over {len(ranks)} ranks, and the files of {absent} lack it")
        dim, intervals = splits[name]
        cut = tuple(tuple((int(start), int(stop)) for start, stop in part) for part in intervals)
        parts = tuple(found.tensors[name] for found, _ in read)
        pieces = sorted({piece for part in cut for piece in part})
        fits = all(part.shape[dim] == sum(b - a for a, b in own) for part, own in zip(parts, cut, strict=True))
        if not fits or [start for start, _ in pieces] != [0, *(stop for _, stop in pieces[:-1])]:
            raise ValueError(f"{folder}: {name} is not cut as the file says, {dim} {cut!r:.100}")
        checkpoint.tensors[name] = _Joined(parts, dim, cut)
    return checkpoint


def _of_all_experts(splits: Mapping[str, Any], names: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """What is told of the experts that a rank lists, for all of them: they are alike."""
    like = {(m[1], m[3]): split for name, split in splits.items() if (m := _EXPERT.fullmatch(name))}
    found = {n: like[m[1], m[3]] for n in names if (m := _EXPERT.fullmatch(n)) and (m[1], m[3]) in like}
    return {**found, **splits}


def _optimizers(folder: Path, rank: str) -> list[Path]:
    pattern = "*optim_states.pt" if rank == "*" else f"*mp_rank_{rank}*optim_states.pt"
    found = sorted(folder.glob(pattern), key=natural)
    return [path for path in found if not path.name.startswith("expp_rank_")]


def _read_rank(
    folder: Path, rank: str, exclude_frozen: bool, place: int = 0, slices: Sequence[str] = ()
) -> tuple[Checkpoint, Any]:
    """What the files of one model-parallel rank hold, the `place`-th slice, and how tensors are cut over slices."""
    found_models = sorted(folder.glob(f"*mp_rank_{rank}_model_states.pt"), key=natural)
    experts = [path for path in found_models if re.match(r"layer_\d+_expert_", path.name)]
    models = [path for path in found_models if path not in experts]
    optimizers = _optimizers(folder, rank)
    if not models:
        raise ValueError(f"{folder} has no '*mp_rank_*_model_states.pt'")
    model, reader = _load(models[0]), _Reader()
    found = Checkpoint(aliases=dict(model.get("shared_params") or (model.get("ds_extra") or {}).get("aliases") or {}))
    buffers, where = set(model.get("buffer_names") or ()), _weights_of(folder, models[0], model, place)
    module = {name: tensor for name, (tensor, _, _) in where.items()}
    listed = model.get("param_shapes") or () if optimizers else ()
    groups = [{name: _shape(shape, name) for name, shape in group.items()} for group in listed]
    trained = {name for group in groups for name in group}
    spread = _spread(model, experts, folder, [_optimizers(folder, each) for each in slices])
    if spread is not None and spread.tensor > 1 and place:  # experts that are dealt to slices are files of the first
        experts = sorted(folder.glob(f"layer_*_expert_*_mp_rank_{slices[0]}_model_states.pt"), key=natural)
    frozen_shapes = model.get("frozen_param_shapes") or {}
    for name, tensor in module.items():
        whole = name in buffers or not models[0].name.startswith("zero_pp_rank")
        if name in trained or name in found.aliases or not whole:
            continue
        if exclude_frozen and groups and name not in buffers:
            continue
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError(f"{models[0]} holds {name!r:.100}, which is no named tensor")
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        _, path, keys = where[name]
        found.tensors[name] = Lazy(tensor.shape, dtype, ((path, keys, 0, tensor.numel()),), reader)
    if len(models) != (model.get("dp_world_size") if models[0].name.startswith("zero_pp_rank") else 1):
        raise ValueError(f"{folder} has {len(models)} model files, {models[0].name} names other ranks: it is not whole")
    if models[0].name.startswith("zero_pp_rank") and not exclude_frozen:
        for name, value in frozen_shapes.items():
            shape = _shape(value, name)
            parts = _striped(models, ("frozen_param_fragments", name), 0, shape.numel())
            found.tensors[name] = Lazy(shape, torch.float32, parts, reader)
    if groups:
        _add_trained(found, groups, optimizers, reader, spread)
    elif not optimizers:
        _untie(found, module)
    if spread is not None and not exclude_frozen:
        _add_frozen_experts(found, (model.get("ds_extra") or {}).get("experts") or {}, models, spread, reader)
    if spread is not None:
        _add_experts(found, experts, spread, reader, exclude_frozen=exclude_frozen and bool(groups))
    order = {name: place for place, name in enumerate(module)}
    found.tensors = dict(sorted(found.tensors.items(), key=lambda item: order.get(item[0], len(order))))
    return found, (model.get("ds_extra") or {}).get("splits")


_Where = tuple[Tensor, Path, tuple[Any, ...]]


def _weights_of(folder: Path, file: Path, model: Mapping[str, Any], place: int) -> dict[str, _Where]:
    """The tensors of a model's file, or those of a stage in files of its layers: each with where it lies."""
    if model["module"] is not None:
        return {name: (tensor, file, ("module", name)) for name, tensor in model["module"].items()}
    prefixes = (model.get("ds_extra") or {}).get("layers")
    if not isinstance(prefixes, (Mapping, type(None))):
        raise ValueError(f"{file} tells its layers by a {type(prefixes).__name__}; expected a dict")
    if prefixes is None and not model.get("param_shapes"):
        raise ValueError(f"{file} does not tell the names of its layers' weights; load it with its PipelineModule")
    listed = {*(model.get("frozen_param_shapes") or ()), *(model.get("buffer_names") or ())}
    found: dict[str, _Where] = {}
    for path in sorted(folder.glob("layer_*-model_states.pt"), key=natural):
        match = re.fullmatch(r"layer_(\d+)-(?:model_(\d+)-)?model_states\.pt", path.name)
        if match is None or (match[2] is not None and int(match[2]) != place):
            continue
        prefix = f"{int(match[1])}." if prefixes is None else prefixes.get(str(int(match[1])))
        for name, tensor in _load(path).items() if isinstance(prefix, str) else ():
            if prefixes is not None or f"{prefix}{name}" in listed:
                found[f"{prefix}{name}"] = tensor, path, (name,)
    return found


def _untie(found: Checkpoint, module: Mapping[str, Tensor]) -> None:
    """Stage 0 records no tied names: they are those that share memory in the file."""
    owners: dict[tuple[int, Any], str] = {}
    for name in list(found.tensors):
        owner = owners.setdefault((module[name].data_ptr(), module[name].shape), name)
        if owner != name and module[name].numel():
            found.aliases[name] = owner
            del found.tensors[name]


def _striped(files: Sequence[Path], keys: tuple[Any, ...], offset: int, numel: int) -> tuple[_Part, ...]:
    """Stage 3: every rank has its own part of ceil(numel / ranks) elements."""
    chunk = -(-numel // len(files))
    held = [min(chunk, max(numel - rank * chunk, 0)) for rank in range(len(files))]
    return tuple((path, keys, offset, offset + held[rank]) for rank, path in enumerate(files) if held[rank])


def _add_trained(
    found: Checkpoint, groups: list[dict[str, Any]], every: Sequence[Path], reader: _Reader, spread: _Spread | None
) -> None:
    first, files = _load(every[0])["optimizer_state_dict"], every
    by_parameter = "fp32_flat_groups" in first
    key = "fp32_flat_groups" if by_parameter else "single_partition_of_fp32_groups"
    if key not in first:
        raise ValueError(f"{files[0]} has no master weights: it is no ZeRO checkpoint")
    count = first.get("partition_count", len(files)) if spread is None or spread.tensor == 1 else len(files)
    found.world = max(count) if isinstance(count, (list, tuple)) else int(count)
    stage = first.get("zero_stage")  # a stand-in where it is DeepSpeed's enum
    found.stage = 3 if by_parameter else stage if isinstance(stage, int) else 1
    if found.world != len(files):
        raise ValueError(f"{files[0].parent} was written by {found.world} ranks, but has {len(files)} optimizer files")
    if len(first[key]) != len(groups):
        raise ValueError(f"{files[0]} has {len(first[key])} flat tensors, the model file lists {len(groups)}")
    gaps = first.get("param_alignment_paddings") or [[0] * len(group) for group in groups]
    parts_of = [1] * len(groups) if spread is None else spread.parts(first, len(groups), by_parameter)
    tensors = [(number, part) for number, count in enumerate(parts_of) for part in range(count)]
    for number, part in tensors:
        group, offset = groups[number], 0
        of_experts = spread is not None and any(_EXPERT.fullmatch(name) for name in group)
        files = spread.files(every, parts_of[number], part) if spread is not None and of_experts else every
        whole = sum(math.prod(shape) for shape in group.values()) + sum(gaps[number] if not by_parameter else ())
        shard = -(-whole // (2 * len(files))) * 2
        for place, (name, shape) in enumerate(group.items()):
            numel = math.prod(shape)
            entry = ("optimizer_state_dict", key, number)
            if by_parameter:
                parts = _striped(files, entry, offset, numel)
                offset += -(-numel // len(files))
            else:
                parts = tuple(
                    (files[rank], entry, max(offset - rank * shard, 0), min(offset + numel - rank * shard, shard))
                    for rank in range(offset // shard, -(-(offset + numel) // shard))
                )
                offset += numel + gaps[number][place]
            whole_name = name if spread is None else spread.name(name, parts_of[number], part)
            found.tensors[whole_name] = Lazy(torch.Size(shape), torch.float32, parts, reader)


_EXPERT = re.compile(r"(.*\bdeepspeed_experts\.)(\d{1,9})(\..*)")


@dataclass(frozen=True)
class _Spread:
    """How experts lie on ranks, which number those that they hold from 0."""

    layers: Mapping[str, int]
    data_first: bool
    sizes: Sequence[int] | None
    slices: Mapping[str, int]
    folder: Path
    tensor: int = 1
    """Tensor-parallel ranks to which experts are dealt as to data-parallel ones, of which these are neighbours."""
    everybody: Sequence[Path] = ()
    """Then the optimizers' files of all of them."""

    def parts(self, first: Mapping[str, Any], flats: int, by_parameter: bool) -> list[int]:
        """Over how many ranks the experts of each flat tensor are spread; 1 where it has none."""
        base = first["optimizer_state_dict"] if by_parameter else first["base_optimizer_state"]
        groups = base["param_groups"] if isinstance(base, Mapping) else first.get("param_groups") or [{}] * flats
        names = [re.fullmatch(r"ep_size_(\d{1,6})", str(g.get("name", ""))) if g.get("moe") else None for g in groups]
        sizes = self.sizes or [1 if name is None else int(name[1]) for name in names]
        members = [list(group["params"]) for group in groups] if by_parameter else [[flat] for flat in range(flats)]
        result = [1] * flats
        for size, own in zip(sizes, members, strict=True):
            for flat in own:
                result[flat] = max(int(size), 1)
        return result

    def files(self, files: Sequence[Path], count: int, part: int) -> list[Path]:
        """Those of the ranks that hold a part of the experts."""
        files = self.everybody or files
        copies, rest = divmod(len(files), count)
        if rest:
            raise ValueError(f"{self.folder}: experts on {count} ranks do not fit the {len(files)} that wrote them")
        step = range(copies)
        return [files[part * copies + copy] if self.data_first else files[copy * count + part] for copy in step]

    def name(self, name: str, count: int, part: int) -> str:
        """What a rank's own name is in the whole model."""
        found = _EXPERT.fullmatch(name)
        if found is None:
            return name
        if not self.layers.get(found[1]) or self.layers[found[1]] % count:
            raise ValueError(f"{self.folder}: {self.layers.get(found[1])} experts {name} are not on {count} ranks")
        local = self.layers[found[1]] // count
        return f"{found[1]}{int(found[2]) % local + part * local}{found[3]}"


def _spread(
    model: Mapping[str, Any], experts: Sequence[Path], folder: Path, optimizers: Sequence[Sequence[Path]]
) -> _Spread | None:
    """How experts lie on ranks, whose `optimizers` are given by slice; None where there are no experts."""
    if "num_experts" not in model:
        return None
    told = (model.get("ds_extra") or {}).get("experts")
    if told is not None:
        tensor = told.get("tensor", 1)
        counts = [*told["layers"].values(), *told.get("slices", {}).values(), *told["sizes"], tensor]
        if any(type(count) is not int or not 0 <= count < 2**20 for count in counts):
            raise ValueError(f"{folder}: numbers of experts are {counts!r:.200}")
        slices, data_first = told.get("slices", {}), bool(told["data_first"])
        if tensor == 1:
            return _Spread(told["layers"], data_first, told["sizes"], slices, folder)
        if len(optimizers) != tensor or len({len(each) for each in optimizers}) > 1:
            raise ValueError(f"{folder}: experts were dealt to {tensor} slices, but files are of {len(optimizers)}")
        everybody = [path for ranks in zip(*optimizers, strict=True) for path in ranks]
        return _Spread(told["layers"], data_first, told["sizes"], slices, folder, tensor, everybody)
    layers: dict[str, int] = {}
    for name in (name for path in experts for name in _load(path)):
        found = _EXPERT.fullmatch(name) if isinstance(name, str) else None
        if found is not None:
            layers[found[1]] = max(layers.get(found[1], 0), int(found[2]) + 1)
    config = model.get("ds_config") or {}
    return _Spread(layers, bool(config.get("use_data_before_expert_parallelism")), None, {}, folder)


def _add_frozen_experts(
    found: Checkpoint, told: Mapping[str, Any], models: Sequence[Path], spread: _Spread, reader: _Reader
) -> None:
    """Stage 3: experts that are not trained, of which the model files of some ranks have parts."""
    for name, (size, count) in (told.get("frozen") or {}).items():
        shape = _shape(size, name)
        for part in range(int(count)):
            names = [
                re.search(r"zero_pp_rank_\d+_mp_rank_\d+", path.name) for path in spread.files(models, count, part)
            ]
            files = [models[0].with_name(f"{each[0]}_model_states.pt") for each in names if each is not None]
            whole = spread.name(name, int(count), part)
            parts = _striped(files, ("frozen_param_fragments", whole), 0, shape.numel())
            found.tensors[whole] = Lazy(shape, torch.float32, parts, reader)


def _add_experts(
    found: Checkpoint, files: Sequence[Path], spread: _Spread, reader: _Reader, *, exclude_frozen: bool
) -> None:
    """What of experts has no master weights, and slices of them put together."""
    for path in () if exclude_frozen else files:
        for name, tensor in _load(path).items():
            if isinstance(name, str) and isinstance(tensor, Tensor) and name not in found.tensors:
                dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
                found.tensors[name] = Lazy(tensor.shape, dtype, ((path, (name,), 0, tensor.numel()),), reader)
    for name, count in spread.slices.items():
        before, _, last = name.rpartition(".")
        parts = [found.tensors.pop(f"{before}.deepspeed_experts.{part}.{last}", None) for part in range(count)]
        if exclude_frozen and all(part is None for part in parts):
            continue
        if not parts or any(part is None or not part.shape or part.shape != parts[0].shape for part in parts):
            raise ValueError(f"{spread.folder}: {name} lies in {count} slices, of which some are not there")
        shape = torch.Size((len(parts) * parts[0].shape[0], *parts[0].shape[1:]))
        found.tensors[name] = Lazy(shape, parts[0].dtype, tuple(p for part in parts for p in part.parts), reader)


@dataclass(frozen=True)
class Plan:
    """The files to write: name → tensors."""

    shards: dict[str, list[str]]
    index: str | None
    total: int


def plan_shards(sizes: Mapping[str, int], limit: int | str | None, safe: bool) -> Plan:
    """Names in order, cut into files that do not exceed `limit` bytes unless one tensor alone does."""
    most = parse_size(limit) if limit is not None else None
    groups: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if groups[-1] and most is not None and held + size > most:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    stem, ending = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    total = sum(sizes.values())
    if len(groups) == 1:
        return Plan({f"{stem}.{ending}": groups[0]}, None, total)
    names = [f"{stem}-{number:05d}-of-{len(groups):05d}.{ending}" for number in range(1, len(groups) + 1)]
    return Plan(dict(zip(names, groups, strict=True)), f"{stem}.{ending}.index.json", total)


def parse_size(text: int | str) -> int:
    """Bytes of "5GB", "200MiB" or a number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", str(text), re.IGNORECASE)
    if match is None:
        raise ValueError(f"a size is a number with KB, MB, GB, TB, KiB, MiB, GiB or TiB, found {text!r}")
    power = " KMGT".index(match[2].upper() or " ")
    size = int(float(match[1]) * (1024 if match[3] else 1000) ** power) if len(match[1]) < 30 else 0
    if size < 1:
        raise ValueError(f"a size is at least 1 byte, found {text!r:.50}")
    return size


def write_shards(
    output: Path, tensors: Mapping[str, Any], aliases: Mapping[str, str], *, limit: int | str | None = "5GB",
    safe: bool = False, dtype: torch.dtype | None = None, progress: Callable[[int, int], None] | None = None,
) -> Plan:  # fmt: skip
    """Write tensors, or things with `contiguous()`, `shape` and `dtype` that give one, with an index if there are
    several files. A tied name shares its tensor in a torch file, and is a copy in safetensors, which cannot share.
    """
    stem, ending = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    name_of_ours = re.compile(rf"{stem}(-\d+-of-\d+)?\.{ending}(\.index\.json)?")
    there = [path.name for path in output.iterdir() if name_of_ours.fullmatch(path.name)] if output.is_dir() else []
    if there:
        raise ValueError(f"{output} has {there[0]} already, with which new files would mix; name another folder")
    output.mkdir(parents=True, exist_ok=True)
    entries = dict(tensors)
    kinds = {n: dtype if dtype and v.dtype.is_floating_point else v.dtype for n, v in entries.items()}
    sizes = {name: math.prod(value.shape) * kinds[name].itemsize for name, value in entries.items()}
    tied = {alias: sizes[owner] for alias, owner in aliases.items() if owner in sizes}
    plan = plan_shards({**sizes, **tied} if safe else sizes, limit, safe)
    for names in plan.shards.values() if not safe else ():
        names += [alias for alias in tied if aliases[alias] in names]
    done = 0
    for file, names in plan.shards.items():
        write = _write_safetensors if safe else _write_torch
        shapes = {name: torch.Size(entries[aliases.get(name, name)].shape) for name in names}
        dtypes = {name: kinds[aliases.get(name, name)] for name in names}
        with _new_file(output / file) as target:
            for name in write(target, shapes, dtypes, aliases, lambda name: entries[name].contiguous()):
                done += sizes[name] if name in sizes else tied[name] * safe
                if progress is not None:
                    progress(done, plan.total)
    if plan.index is not None:
        where = {name: file for file, names in plan.shards.items() for name in names}
        index = {"metadata": {"total_size": plan.total}, "weight_map": where}
        with _new_file(output / plan.index) as target:
            target.write((json.dumps(index, indent=2) + "\n").encode())
    return plan


@contextmanager
def _new_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears under its name when all of it is on the disk; nothing that lies in wait there is followed."""
    part = path.with_name(f".{path.name}.part-{secrets.token_hex(8)}")
    try:
        with open(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666), "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.rename(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def check_output(output: Path, folder: Path) -> None:
    """Refuse to write into the checkpoint that is read."""
    target, source = Path(os.path.realpath(output)), Path(os.path.realpath(folder))
    if target == source or source in target.parents or (target.exists() and not target.is_dir()):
        raise ValueError(f"{output} is a file, or {folder}, or inside it: what is read stays as it is; name a folder")


_Sizes = Mapping[str, torch.Size]
_Kinds = Mapping[str, torch.dtype]
_Fetch = Callable[[str], Tensor]


def _put(file: IO[bytes], tensor: Tensor, dtype: torch.dtype) -> None:
    host = tensor.detach().to("cpu", dtype).contiguous()
    if host.numel():
        file.write(memoryview((ctypes.c_char * host.nbytes).from_address(host.data_ptr())).cast("B"))


def _write_safetensors(
    file: IO[bytes], shapes: _Sizes, dtypes: _Kinds, aliases: Mapping[str, str], fetch: _Fetch
) -> Iterator[str]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    shapes = dict(sorted(shapes.items(), key=lambda item: -dtypes[item[0]].itemsize))  # each begins aligned
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + shape.numel() * dtypes[name].itemsize
        header[name] = {"dtype": _SAFE_NAMES[dtypes[name]], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in shapes:
        _put(file, fetch(aliases.get(name, name)), dtypes[name])
        yield name


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor in the pickle of a torch file, whose bytes follow later."""

    key: str
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class _Storage:
    slot: _Slot


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        kind = torch.storage._dtype_to_storage_type_map()[obj.slot.dtype]
        return ("storage", getattr(torch, kind), obj.slot.key, "cpu", obj.slot.shape.numel())

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, _Slot):
            return NotImplemented
        stride = torch.empty(obj.shape, device="meta").stride()
        arguments: Any = (_Storage(obj), 0, tuple(obj.shape), stride, False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, arguments


def _write_torch(
    file: IO[bytes], shapes: _Sizes, dtypes: _Kinds, aliases: Mapping[str, str], fetch: _Fetch
) -> Iterator[str]:
    """What torch.save writes of a state dict, tensor by tensor instead of all from memory."""
    owners = [name for name in shapes if name not in aliases]
    slots = {name: _Slot(str(place), shapes[name], dtypes[name]) for place, name in enumerate(owners)}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        with archive.open("archive/data.pkl", "w") as target:
            _Pickler(target, 2).dump(OrderedDict((name, slots[aliases.get(name, name)]) for name in shapes))
        archive.writestr("archive/byteorder", sys.byteorder)
        for name in owners:
            entry = zipfile.ZipInfo(f"archive/data/{slots[name].key}")
            fixed = 30 + len(entry.filename) + 20 + 4  # local header, name, sizes of 64 bits, our own extra's head
            padding = -(file.tell() + fixed) % 64
            entry.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
            with archive.open(entry, "w", force_zip64=True) as target:
                _put(target, fetch(name), dtypes[name])
            yield name
        archive.writestr("archive/version", "3\n")
        yield from (name for name in shapes if name in aliases)


class _Progress:
    """How much is written, on standard error, now and then: a line that is redrawn, or lines in a file."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._every = 0.5 if self._terminal else 10.0
        self._started = self._last = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() >= self._last + self._every:
            self._last = time.monotonic()
            sys.stderr.write(f"{done / max(total, 1):4.0%} of {_shown(total)}" + ("\r" if self._terminal else "\n"))

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started


def _shown(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def main(arguments: Sequence[str] | None = None, *, choose_dtype: bool = False) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint_dir", type=Path, help="the folder with the tags, for instance path/checkpoint-12")
    parser.add_argument("output_dir", type=Path, help="where the state dict goes")
    parser.add_argument("--max_shard_size", default="5GB", help="bytes of a file, for instance 500MB (default: 5GB)")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="checkpoint tag, for instance global_step1; default: what `latest` says")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave frozen parameters out")
    parser.add_argument("-d", "--debug", action="store_true", help="say where every tensor comes from")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default=None if choose_dtype else "fp32",
                        required=choose_dtype, help="of floating-point tensors")  # fmt: skip
    options = parser.parse_args(arguments)
    try:
        _convert(options)
    except Exception as error:  # whatever a checkpoint of a stranger makes go wrong
        if options.debug:
            raise
        _say(f"{parser.prog}: {type(error).__name__}: {error}")
        sys.exit(1)


def _say(text: str) -> None:
    """A line on standard error; what a name in a file could tell the terminal is spelled out."""
    sys.stderr.write("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text) + "\n")


def _convert(options: argparse.Namespace) -> None:
    folder = find_tag(options.checkpoint_dir, options.tag)
    check_output(options.output_dir, folder)
    parse_size(options.max_shard_size)
    found = read_checkpoint(folder, exclude_frozen=options.exclude_frozen_parameters)
    sys.stderr.write(
        f"{ascii(str(folder))[1:-1]}: stage {found.stage}, {found.world} ranks, {len(found.tensors)} tensors\n"
    )
    for name, lazy in found.tensors.items() if options.debug else ():
        sys.stderr.write(
            f"  {ascii(name)[1:-1]} {tuple(lazy.shape)}: {[(p.name, a, b) for p, _, a, b in lazy.parts]}\n"
        )
    limit, dtype = options.max_shard_size, DTYPES[options.dtype]
    progress = _Progress()
    plan = write_shards(options.output_dir, found.tensors, found.aliases, limit=limit, dtype=dtype, progress=progress,
                        safe=options.safe_serialization)  # fmt: skip
    first, *more = (str(options.output_dir / file) for file in plan.shards)
    files = f"{first} and {len(more)} more, with an index" if more else first
    _say(f"wrote {files}: tag {folder.resolve().name}, {_shown(plan.total)} in {progress.seconds:.1f} s")


if __name__ == "__main__":
    main()
