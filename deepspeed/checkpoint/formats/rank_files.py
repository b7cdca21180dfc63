"""What a writer hands over: objects, tensors and texts by file name, and the host memory that they lie in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.formats import safetensors
from deepspeed.checkpoint.formats.safe_load import LEAST, StandIns
from deepspeed.checkpoint.formats.training_state import TrainingState
from deepspeed.checkpoint.formats.values import plain

Allocate = Callable[[int, torch.dtype], Tensor]
"""(elements, dtype) → one-dimensional host memory, pinned or shared where the caller wants that."""


@dataclass(slots=True)
class Files:
    """The files of one rank, not yet written."""

    objects: dict[str, Any] = field(default_factory=dict)
    """For torch.save."""
    tensors: dict[str, safetensors.TensorFile] = field(default_factory=dict)
    """For safetensors."""
    texts: dict[str, str] = field(default_factory=dict)

    def write(self, directory: Path) -> None:
        """Write them all in place: for tools and tests. Training saves through the durable storage."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, value in self.objects.items():
            torch.save(value, directory / name)
        for name, content in self.tensors.items():
            safetensors.save(content, directory / name)
        for name, text in self.texts.items():
            (directory / name).write_text(text, encoding="utf-8")


class Host:
    """Brings tensors into host memory.

    Without `allocate` a tensor that is there already is taken as it is; with it everything is copied, so that
    training may go on while the copy is written. With `stand_ins` what would have to be copied only to be written is
    replaced by stand-ins.
    """

    def __init__(self, allocate: Allocate | None = None, stand_ins: StandIns | None = None) -> None:
        self._allocate = allocate
        self._stand_ins = stand_ins if allocate is None else None
        self._taken: dict[tuple[Any, ...], Tensor] = {}

    def take(self, tensor: Tensor, *, alone: bool = True) -> Tensor:
        """The tensor in host memory; tied tensors stay tied.

        `alone`: not as a view of a larger storage, of which torch.save would write all.
        """
        tensor = tensor.detach()
        whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        here = tensor.device.type == "cpu"
        if self._allocate is None and ((here and whole) or not alone or (not here and self._stand_ins is None)):
            return tensor.cpu()
        key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() == 0 or key not in self._taken:
            self._taken[key] = self.flat([(0, tensor)], tensor.numel(), tensor.dtype).view(tensor.shape)
        return self._taken[key]

    def flat(self, parts: Iterable[tuple[int, Tensor]], numel: int, dtype: torch.dtype) -> Tensor:
        """One tensor of `numel` elements with each part at its position, zero elsewhere."""
        parts = [(position, part.detach().reshape(-1)) for position, part in parts if part.numel()]
        if self._allocate is None and (whole := _already_flat(parts, numel, dtype)) is not None:
            return whole
        if self._stand_ins is not None and numel * dtype.itemsize >= LEAST and all(p.dtype == dtype for _, p in parts):
            return self._stand_ins.flat(parts, numel, dtype)
        result = torch.empty(numel, dtype=dtype) if self._allocate is None else self._allocate(numel, dtype)
        reached = 0
        for position, part in sorted(parts, key=lambda item: item[0]):
            result[reached:position].zero_()
            result[position : position + part.numel()].copy_(part)
            reached = position + part.numel()
        result[reached:].zero_()
        return result


def rank_entries(state: TrainingState, host: Host) -> dict[str, Any] | None:
    """What a rank alone knows; None if it knows nothing."""
    if state.rng is None and state.data is None and state.own_buffers is None and not state.reductions:
        return None
    entries: dict[str, Any] = plain({"rng": state.rng, "data": state.data}, "the rank's state")
    if state.pacing:
        entries["pacing"] = plain(state.pacing, "pacing")
    if state.own_buffers is not None:
        entries["buffers"] = {name: host.take(tensor) for name, tensor in state.own_buffers.items()}
    if state.reductions:
        entries["reductions"] = {
            name: {key: host.take(tensor) for key, tensor in kept.items()} for name, kept in state.reductions.items()
        }
    return entries


def _already_flat(parts: list[tuple[int, Tensor]], numel: int, dtype: torch.dtype) -> Tensor | None:
    """The memory that the parts are views of, where it is laid out as wanted already."""
    if not parts:
        return None
    first = parts[0][1]
    base = first.storage_offset() - parts[0][0]
    storage = first.untyped_storage()
    rest = storage.nbytes() // first.element_size() - base - numel
    fits = 0 <= base <= 256 and 0 <= rest <= 256  # torch.save writes all of a storage
    alike = all(
        part.device.type == "cpu"
        and part.dtype == dtype
        and part.untyped_storage().data_ptr() == storage.data_ptr()
        and part.storage_offset() == base + position
        for position, part in parts
    )
    filled = sum(part.numel() for _, part in parts)
    if not (fits and alike and filled + 256 >= numel):
        return None
    return torch.empty(0, dtype=dtype).set_(storage, base, (numel,), (1,))
