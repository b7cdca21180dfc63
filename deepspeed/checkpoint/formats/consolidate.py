"""Whole state dicts as files of bounded size with an index, from memory or from any checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from deepspeed.checkpoint import zero_to_fp32, zero_to_torch
from deepspeed.checkpoint.formats.bulk_read import fetch
from deepspeed.checkpoint.formats.source import Source
from deepspeed.checkpoint.zero_to_fp32 import Plan, write_shards

__all__ = ["save_checkpoint_weights", "save_state_dict", "scripts", "tied_names"]

Progress = Callable[[int, int], None]
"""(bytes written, of how many)."""


def tied_names(state_dict: Mapping[str, Tensor]) -> dict[str, str]:
    """The names whose tensor is another name's: alias → first name."""
    owners: dict[tuple[torch.device, int, torch.Size, tuple[int, ...]], str] = {}
    aliases = {}
    for name, tensor in state_dict.items():
        if tensor.numel() == 0 or tensor.is_meta:
            continue
        owner = owners.setdefault((tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()), name)
        if owner != name:
            aliases[name] = owner
    return aliases


def save_state_dict(
    state_dict: Mapping[str, Tensor],
    output: str | Path,
    *,
    max_shard_size: int | str | None = None,
    safe: bool = False,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Write tensors; each is brought to host memory and to `dtype` when its turn comes."""
    aliases = tied_names(state_dict)
    kept = {name: tensor for name, tensor in state_dict.items() if name not in aliases}
    return write_shards(Path(output), kept, aliases, limit=max_shard_size, safe=safe, dtype=dtype, progress=progress)


@dataclass(frozen=True, slots=True)
class _InCheckpoint:
    """A weight that is read when it is written."""

    source: Source
    name: str
    shape: torch.Size
    dtype: torch.dtype

    def contiguous(self) -> Tensor:
        """The tensor, as exact as the checkpoint has it; in memory of its own, which ends with it."""
        return fetch(self.source.find(self.name, "master")).view(self.shape).to(self.dtype)


def save_checkpoint_weights(
    source: Source,
    output: str | Path,
    *,
    max_shard_size: int | str | None = "5GB",
    safe: bool = True,
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
) -> Plan:
    """Write the weights of any checkpoint; master weights where it has them."""
    tensors = {}
    for name, shape in source.shapes.items():
        kept = source.buffers[name].dtype if name in source.buffers else dtype
        tensors[name] = _InCheckpoint(source, name, shape, dtype if kept.is_floating_point else kept)
    aliases = dict(source.aliases)
    return write_shards(Path(output), tensors, aliases, limit=max_shard_size, safe=safe, dtype=dtype, progress=progress)


def scripts() -> dict[str, str]:
    """The scripts that lie beside checkpoints, by name."""
    files = [Path(str(module.__file__)) for module in (zero_to_fp32, zero_to_torch)]
    return {file.name: file.read_text("utf-8") for file in files}
