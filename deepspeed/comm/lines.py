"""`Line`: the way between this rank and another of a group, for who sends along it again and again."""

from __future__ import annotations

from typing import Any

import torch.distributed as td
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed.comm.dispatch import DEFAULT, labelled
from deepspeed.comm.operations import OPERATIONS, Operation
from deepspeed.comm.pending import CollectiveWork

__all__ = ["Line"]

_ISEND, _IRECV = OPERATIONS["isend"], OPERATIONS["irecv"]
_SENT, _RECEIVED = (False, "isend", None), (False, "irecv", None)


def _send(tensor: Tensor, peer: int, group: ProcessGroup, place: int, tag: int) -> Any:
    return group.send([tensor], place, tag)


def _receive(tensor: Tensor, peer: int, group: ProcessGroup, place: int, tag: int) -> Any:
    return group.recv([tensor], place, tag)


_SEND = Operation("isend", _send, p2p=True, peer=1, free=True)
_RECEIVE = Operation("irecv", _receive, p2p=True, peer=1, free=True)


class Line:
    """Messages of one tag, in their order: as `isend` and `irecv`, with everything that stays the same looked up once.

    Tensors are plain ones, in one piece, and not complex.
    """

    __slots__ = ("_group", "_peer", "_place", "_state", "_tag")

    def __init__(self, group: ProcessGroup, peer: int, tag: int = 0) -> None:
        """To and from global rank `peer`."""
        self._group, self._peer, self._tag = group, peer, tag
        self._place = td.get_group_rank(group, peer)
        self._state = DEFAULT.state_of(group)

    def send(self, tensor: Tensor, label: str) -> CollectiveWork | None:
        """Begin to send; the tensor must not change before the handle was waited for."""
        if DEFAULT.events.wanted or self._state.off:
            with labelled(label):
                args = (tensor, self._peer, self._group, self._tag)
                return DEFAULT.run(_ISEND, args, tensor, self._group, True, _SENT)  # type: ignore[no-any-return]
        way = (tensor, self._peer, self._group, self._place, self._tag)
        return DEFAULT.begin(_SEND, self._state, tensor, label, way)  # type: ignore[no-any-return]

    def receive(self, tensor: Tensor, label: str) -> CollectiveWork | None:
        """Begin to receive."""
        if DEFAULT.events.wanted or self._state.off:
            with labelled(label):
                args = (tensor, self._peer, self._group, self._tag)
                return DEFAULT.run(_IRECV, args, tensor, self._group, True, _RECEIVED)  # type: ignore[no-any-return]
        way = (tensor, self._peer, self._group, self._place, self._tag)
        return DEFAULT.begin(_RECEIVE, self._state, tensor, label, way)  # type: ignore[no-any-return]
