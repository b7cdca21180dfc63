"""Small agreements between ranks, on the hosts: who is where, before anybody waits for a parameter that never comes."""

from __future__ import annotations

import zlib
from typing import Any

import torch

from deepspeed import comm
from deepspeed.errors import CommError
from deepspeed.parallel import AxisGroup

__all__ = ["DONE", "STEP", "Control", "start_code"]

DONE = 0
"""This rank's pass is over; it serves the others until theirs are."""
STEP = -1
"""This rank takes an optimizer step."""


def start_code(key: object) -> int:
    """The code of a rank that begins a pass; equal keys have equal codes."""
    return -2 - zlib.crc32(repr(key).encode())


class Control:
    """Exchanges one number per rank; requests are positive numbers."""

    def __init__(self, axis: AxisGroup) -> None:
        self._axis = axis
        self._group: Any = axis.twin("gloo")
        self._codes = torch.zeros(axis.size, dtype=torch.int64)

    def exchange(self, code: int, what: str) -> list[int]:
        """Every rank's code, in the order of the ranks."""
        with comm.labelled(what):
            comm.all_gather_into_tensor(self._codes, torch.tensor([code]), group=self._group)
        return [int(each) for each in self._codes.tolist()]

    def refuse(self, where: str) -> CommError:
        """The error of ranks that cannot go on together: each tells where it is."""
        told: list[Any] = [None] * self._axis.size
        comm.all_gather_object(told, where, group=self._group)
        lines = [f"rank {rank} {text}" for rank, text in zip(self._axis.ranks, told, strict=True)]
        return CommError(
            "ranks do different things, so that parameters cannot be gathered: "
            + "; ".join(lines)
            + ". Every rank must call forward, backward and step the same number of times."
        )
