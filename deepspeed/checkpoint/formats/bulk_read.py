"""Brings values of a checkpoint into memory: asked for one by one, then read in the order in which files hold them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed.checkpoint.formats.source import StoredPart
from deepspeed.checkpoint.storage.block_reader import FileCheck, Range
from deepspeed.ops.native import bytes_of

_STEP = 64 * 2**20  # bytes that wait on the host for their way to a device or into another dtype


@dataclass(frozen=True, slots=True)
class _Order:
    start: int
    values: Tensor
    """The view of the file, for its size and dtype."""
    out: Tensor

    @property
    def direct(self) -> bool:
        """Whether the file's bytes are what the memory is to hold."""
        return self.out.device.type == "cpu" and self.out.dtype == self.values.dtype and self.out.is_contiguous()


class BulkRead:
    """Collects what is wanted of a checkpoint; `run` brings all of it."""

    def __init__(self) -> None:
        self._orders: dict[FileCheck, list[_Order]] = {}
        self._copies: list[tuple[StoredPart, Tensor]] = []

    def add(self, parts: Sequence[StoredPart], out: Tensor) -> None:
        """Want the elements of `parts` one after the other in `out`, which is flat and has as many."""
        reached = 0
        for part in parts:
            target = out[reached : reached + part.values.numel()]
            reached += part.values.numel()
            place = part.opened.place(part.values)
            if place is None:
                self._copies.append((part, target))
                continue
            orders = self._orders.setdefault(place.blocks, [])
            width = part.values.element_size()
            for low in range(0, target.numel(), _STEP // width):
                high = min(low + _STEP // width, target.numel())
                orders.append(_Order(place.start + low * width, part.values[low:high], target[low:high]))

    def run(self) -> None:
        """Read everything; a CheckpointError names the file and the range that is damaged."""
        orders, self._orders = self._orders, {}
        copies, self._copies = self._copies, []
        for blocks, wanted in orders.items():
            for some in _portions(sorted(wanted, key=lambda order: order.start)):
                _fill(blocks, some)
        for part, out in copies:
            out.copy_(part.opened.require(part.values))


def fetch(parts: Sequence[StoredPart]) -> Tensor:
    """The elements of all parts in memory of their own."""
    numel = sum(part.values.numel() for part in parts)
    out = torch.empty(numel, dtype=parts[0].values.dtype if parts else None)
    reads = BulkRead()
    reads.add(parts, out)
    reads.run()
    return out


def _portions(orders: Sequence[_Order]) -> Iterator[list[_Order]]:
    """Neighbours, so that not more than a step's bytes have to wait on the host."""
    some: list[_Order] = []
    waiting = 0
    for order in orders:
        if not order.direct:
            waiting += order.values.nbytes
            if waiting > _STEP:
                yield some
                some, waiting = [], order.values.nbytes
        some.append(order)
    yield some


def _fill(blocks: FileCheck, orders: Sequence[_Order]) -> None:
    ranges, waiting = [], []
    for order in orders:
        target = order.out
        if not order.direct:  # pinned, so that a device takes from it at full speed
            pinned = order.out.device.type == "cuda"
            target = torch.empty(order.values.numel(), dtype=order.values.dtype, pin_memory=pinned)
            waiting.append((target, order.out))
        ranges.append(Range(order.start, bytes_of(target)))
    blocks.fill(ranges)
    for host, out in waiting:
        out.copy_(host)
