"""Buckets on their way, a bounded number of them at any time.

[Note: in flight] The oldest bucket is landed before another one is packed. On a device packing happens on the stream
that computes gradients, reduction and landing on a stream beside it, and the memory of a bucket returns when the first
stream has waited for its landing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.accelerator.beside import Beside
from deepspeed.comm import Pending
from deepspeed.zero.gradients.bucket import Bucket

__all__ = ["Flights"]

_LARGE = 128 << 20  # bytes of a bucket of which one in flight keeps any link busy


@dataclass(eq=False, slots=True)
class _Flight:
    bucket: Bucket
    memory: Tensor
    """What was sent; kept until the stream that packed it has waited for the landing."""
    pending: Pending[Tensor] | None
    told: Pending[Tensor] | None = None
    """What ranks say of its gradients; see `Flights`."""
    landed: Any = None
    """The device's event after landing."""


class Flights:
    """Sends buckets and lands them, in order."""

    def __init__(self, landed: Callable[[Bucket, Pending[Tensor]], None]) -> None:
        """`landed` is called with each bucket that has arrived and of which ranks were asked something."""
        self._landed = landed
        self._flying: deque[_Flight] = deque()
        self._beside: dict[torch.device, Beside] = {}
        self._carried: Any = None
        """The device's event after the last landing in host memory that nobody has waited for."""

    def make_room(self, bucket: Bucket) -> None:
        """Land what has to be before this one is packed."""
        allowed = 1 if bucket.device.type == "cpu" or bucket.nbytes > _LARGE else 2
        while len(self._flying) >= allowed:
            self._land_oldest()

    @torch.no_grad()
    def send(self, bucket: Bucket, packed: Tensor, told: Pending[Tensor] | None = None) -> None:
        """A packed bucket leaves for its owners; `told` is the answer to what ranks were asked of it."""
        beside = self._beside.get(bucket.device)
        if beside is None:
            beside = self._beside[bucket.device] = Beside(bucket.device)
        with comm.labelled(bucket.label), beside:
            flight = _Flight(bucket, packed, bucket.reduction.start(packed, bucket.share), told)
            if beside.device:
                self._land(flight)
                flight.landed = beside.record()
                if bucket.leaves:
                    self._carried = flight.landed
        self._flying.append(flight)

    def land(self) -> None:
        """All that was sent lies with its owners; what left the device is there for the host to read."""
        while self._flying:
            self._land_oldest()
        if self._carried is not None:
            self._carried.synchronize()
            self._carried = None

    def drop(self) -> None:
        """After a backward that failed: the others may never come for the rest of it."""
        for flight in self._flying:
            if flight.landed is not None:
                flight.landed.wait()
        self._flying.clear()

    @torch.no_grad()
    def _land(self, flight: _Flight) -> None:
        pending, flight.pending = flight.pending, None
        if pending is not None:
            flight.bucket.land(pending.wait())

    def _land_oldest(self) -> None:
        flight = self._flying.popleft()
        self._land(flight)
        if flight.landed is not None:
            flight.landed.wait()  # the stream that computes waits, not the host
        if flight.told is not None:
            self._landed(flight.bucket, flight.told)
