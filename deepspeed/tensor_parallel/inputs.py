"""Ranks that share layers must see the same samples: the first forward looks whether they do."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.parallel import AxisGroup

__all__ = ["InputCheck"]


class InputCheck:
    """Compares the inputs of the first forward over the ranks of an axis."""

    def __init__(self, axis: AxisGroup) -> None:
        self._axis = axis
        self._done = False

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise on all ranks where they differ."""
        if self._done:
            return
        self._done = True
        own = torch.tensor([_checksum((args, kwargs))], dtype=torch.int64, device=comm.group_device())
        found = [own.clone() for _ in range(self._axis.size)]  # pretended ranks say nothing
        with comm.labelled("inputs of tensor-parallel ranks"):
            comm.all_gather(found, own, group=self._axis.group)
        sums = [int(value) for value in found]
        different = [rank for rank, value in zip(self._axis.ranks, sums, strict=True) if value != sums[0]]
        if different:
            raise UsageError(
                f"the tensor-parallel ranks {list(self._axis.ranks)} compute one model together and must get the same "
                f"inputs, but those of rank {', '.join(map(str, different))} are not those of rank "
                f"{self._axis.ranks[0]}. Give the data loader the data-parallel rank and size, not the world's, as "
                "engine.deepspeed_io and training_data do"
            )


def _checksum(value: Any) -> int:
    total = 0
    for tensor in _tensors(value):
        data = tensor.detach().cpu().contiguous().reshape(-1)
        total = zlib.crc32(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), total)
        if data.numel():
            total = zlib.crc32(data.view(torch.uint8).numpy().data, total)
    return total


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if not value.is_meta:
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
