"""The weights of any checkpoint as one state dict: in files of bounded size with an index, one tensor at a time."""

from __future__ import annotations

import json
import math
import pickle
import re
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from deepspeed.checkpoint.formats import safetensors
from deepspeed.checkpoint.formats.adapters import Stages, files_of
from deepspeed.checkpoint.formats.bulk_read import fetch
from deepspeed.checkpoint.formats.source import Source
from deepspeed.checkpoint.formats.zero_files.reader import DeepSpeedSource
from deepspeed.checkpoint.storage.block_writer import WriterOptions
from deepspeed.checkpoint.storage.durable import write_file, write_text
from deepspeed.errors import CheckpointError
from deepspeed.ops.native import bytes_of

DTYPES = {
    "fp32": torch.float32, "float32": torch.float32, "fp16": torch.float16, "float16": torch.float16,
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
}  # fmt: skip
Progress = Callable[[int, int], None]
"""(bytes or parameters done, of how many)."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint that is read when `contiguous()` is called."""

    shape: torch.Size
    dtype: torch.dtype
    source: Source = field(repr=False, compare=False)
    name: str
    kind: str = "master"

    def contiguous(self) -> Tensor:
        """The tensor, in memory of its own."""
        return fetch(self.source.find(self.name, self.kind)).view(self.shape).to(self.dtype)

    def parts(self) -> list[tuple[str, int, int]]:
        """Where it lies, in order: file, and the first and last element there."""
        found = [(part.opened.place(part.values), part.values) for part in self.source.find(self.name, self.kind)]
        return [
            (place.blocks.path.name, int(values.storage_offset()), int(values.storage_offset()) + values.numel())
            for place, values in found
            if place is not None
        ]


def weights_of(source: Source, dtype: torch.dtype = torch.float32) -> dict[str, StoredTensor]:
    """Every tensor of the model by name, master weights where there are any; floating-point ones in `dtype`."""
    found = {}
    for name, shape in source.shapes.items():
        kept = source.buffers[name].dtype if name in source.buffers else dtype
        found[name] = StoredTensor(shape, dtype if kept.is_floating_point else kept, source, name)
    return found


def fp32_weights(source: Source, *, exclude_frozen: bool = False) -> dict[str, StoredTensor]:
    """What `zero_to_fp32` gives: master weights of ZeRO, else what the model computed with, in fp32."""
    listed = _listed(source)
    trained = {name for names, _ in source.groups for name in names}
    kind = "master" if source.stage else "param"
    found = {}
    for name, shape in source.shapes.items():
        frozen = name not in trained and name not in source.buffers
        if (listed is not None and name not in listed) or (exclude_frozen and source.stage and frozen):
            continue
        dtype = source.buffers[name].dtype if name in source.buffers else source.dtype(name) or torch.float32
        found[name] = StoredTensor(shape, torch.float32 if dtype.is_floating_point else dtype, source, name, kind)
    return found


def _listed(source: Source) -> set[str] | None:
    """The names that a pipeline's model files list, where they do not tell what layers are called; else None."""
    files = [each for each in files_of(source) if isinstance(each, DeepSpeedSource)]
    stages = source.count if isinstance(source, Stages) else 1
    for each in files:
        if each.splits is None and len(each.model_ranks) > stages:
            raise CheckpointError(
                f"{each.directory} is of {len(each.model_ranks)} model-parallel ranks and does not tell how they cut "
                "tensors"
            )
    if not any(each.unnamed_layers for each in files):
        return None
    if any(not each.model_entries.get("param_shapes") for each in files):
        raise CheckpointError(
            f"{files[0].directory} does not tell the names of its layers' weights; load it with its PipelineModule"
        )
    frozen = {name for each in files for name in each.model_entries.get("frozen_param_shapes") or ()}
    return {name for names, _ in source.groups for name in names} | frozen | set(source.buffers)


# ---- files


@dataclass(frozen=True)
class ShardPlan:
    """The files to write: name → tensors."""

    shards: dict[str, list[str]]
    index: str | None
    total: int

    def write_index(self, folder: Path) -> None:
        """Where there are several files: which of them has which tensor, as Transformers reads it."""
        if self.index is not None:
            where = {name: file for file, names in self.shards.items() for name in names}
            index = {"metadata": {"total_size": self.total}, "weight_map": where}
            write_text(folder / self.index, json.dumps(index, indent=2) + "\n")


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


def plan_shards(sizes: Mapping[str, int], limit: int | str | None, stem: str, ending: str) -> ShardPlan:
    """Names in order, cut into files `stem-….ending` that do not exceed `limit` bytes unless one tensor alone does."""
    most = parse_size(limit) if limit is not None else None
    groups: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if groups[-1] and most is not None and held + size > most:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    total = sum(sizes.values())
    if len(groups) == 1:
        return ShardPlan({f"{stem}{ending}": groups[0]}, None, total)
    names = [f"{stem}-{number:05d}-of-{len(groups):05d}{ending}" for number in range(1, len(groups) + 1)]
    return ShardPlan(dict(zip(names, groups, strict=True)), f"{stem}{ending}.index.json", total)


def write_shards(
    output: str | Path,
    tensors: Mapping[str, Any],
    aliases: Mapping[str, str],
    *,
    limit: int | str | None = "5GB",
    safe: bool = False,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> ShardPlan:
    """Write tensors, or things with `contiguous()`, `shape` and `dtype` that give one, with an index if there are
    several files. A tied name shares its tensor in a torch file, and is a copy in safetensors, which cannot share.
    """
    output = Path(output)
    stem, ending = ("model", ".safetensors") if safe else ("pytorch_model", ".bin")
    name_of_ours = re.compile(rf"{stem}(-\d+-of-\d+)?\{ending}(\.index\.json)?")
    there = [path.name for path in output.iterdir() if name_of_ours.fullmatch(path.name)] if output.is_dir() else []
    if there:
        raise ValueError(f"{output} has {there[0]} already, with which new files would mix; name another folder")
    output.mkdir(parents=True, exist_ok=True)
    kinds = {n: dtype if dtype and v.dtype.is_floating_point else v.dtype for n, v in tensors.items()}
    sizes = {name: math.prod(value.shape) * kinds[name].itemsize for name, value in tensors.items()}
    tied = {alias: sizes[owner] for alias, owner in aliases.items() if owner in sizes}
    plan = plan_shards({**sizes, **tied} if safe else sizes, limit, stem, ending)
    for names in plan.shards.values() if not safe else ():
        names += [alias for alias in tied if aliases[alias] in names]
    done = 0
    for file, names in plan.shards.items():
        content = [(name, tensors[aliases.get(name, name)], kinds[aliases.get(name, name)]) for name in names]

        def fill(stream: Any, content: list[_Entry] = content) -> None:
            nonlocal done
            for name in (_write_safetensors if safe else _write_torch)(stream, content, aliases):
                done += sizes[name] if name in sizes else tied[name] * safe
                if progress is not None:
                    progress(done, plan.total)

        write_file(output / file, fill, WriterOptions(direct=False))
    plan.write_index(output)
    return plan


_Entry = tuple[str, Any, torch.dtype]  # name, what gives the tensor, dtype in the file


def _put(file: IO[bytes], value: Any, dtype: torch.dtype) -> None:
    host = value.contiguous().detach().to("cpu", dtype).contiguous()
    if host.numel():
        file.write(bytes_of(host))


def _write_safetensors(file: IO[bytes], entries: list[_Entry], aliases: Mapping[str, str]) -> Iterator[str]:
    entries = sorted(entries, key=lambda entry: -entry[2].itemsize)  # each begins aligned
    file.write(safetensors.header([(name, value.shape, dtype) for name, value, dtype in entries], {"format": "pt"}))
    for name, value, dtype in entries:
        _put(file, value, dtype)
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


def _write_torch(file: IO[bytes], entries: list[_Entry], aliases: Mapping[str, str]) -> Iterator[str]:
    """What torch.save writes of a state dict, tensor by tensor instead of all from memory."""
    owners = {name: (value, dtype) for name, value, dtype in entries if name not in aliases}
    slots = {
        name: _Slot(str(place), torch.Size(value.shape), dtype)
        for place, (name, (value, dtype)) in enumerate(owners.items())
    }
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        with archive.open("archive/data.pkl", "w") as target:
            _Pickler(target, 2).dump(OrderedDict((name, slots[aliases.get(name, name)]) for name, _, _ in entries))
        archive.writestr("archive/byteorder", sys.byteorder)
        for name, (value, dtype) in owners.items():
            entry = zipfile.ZipInfo(f"archive/data/{slots[name].key}")
            fixed = 30 + len(entry.filename) + 20 + 4  # local header, name, sizes of 64 bits, our own extra's head
            padding = -(file.tell() + fixed) % 64
            entry.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
            with archive.open(entry, "w", force_zip64=True) as target:
                _put(target, value, dtype)
            yield name
        archive.writestr("archive/version", "3\n")
        yield from (name for name, _, _ in entries if name in aliases)


# ---- scripts


_SCRIPT = '''#!/usr/bin/env python
"""Makes one ordinary state dict of the ZeRO checkpoint beside which it lies{more}.

    python {name} CHECKPOINT_DIR OUTPUT_DIR [--safe_serialization] [--max_shard_size 5GB] [--tag TAG]{usage}
"""

import sys

try:
    from deepspeed.checkpoint.zero_to_fp32 import main
except ImportError as error:
    sys.exit(
        f"{name} reads checkpoints with the package deepspeed, which {{sys.executable}} cannot import: {{error}}. "
        "Install it for this Python (pip install deepspeed), or run the script with the Python that trained."
    )

if __name__ == "__main__":
    main({arguments})
'''


def scripts() -> dict[str, str]:
    """The scripts that lie beside checkpoints, by name."""
    other = {"more": ", in a chosen dtype", "usage": " --dtype bf16", "arguments": "choose_dtype=True"}
    return {
        "zero_to_fp32.py": _SCRIPT.format(name="zero_to_fp32.py", more="", usage="", arguments=""),
        "zero_to_torch.py": _SCRIPT.format(name="zero_to_torch.py", **other),
    }
