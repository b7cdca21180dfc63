"""Sends and receives between two ranks, one by one, in a batch, along a line, or all parts to where they belong."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as td
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed.comm.dispatch import DEFAULT, labelled
from deepspeed.comm.operations import OPERATIONS, CommOperation
from deepspeed.comm.pending import AllOf, CollectiveWork
from deepspeed.errors import CommError

_SEND = OPERATIONS["send"]
_RECV = OPERATIONS["recv"]
_ISEND = OPERATIONS["isend"]
_IRECV = OPERATIONS["irecv"]
_BATCH = OPERATIONS["batch_isend_irecv"]

_run: Callable[..., Any] = DEFAULT.run
_begin: Callable[..., CollectiveWork | None] = DEFAULT.run


def send(
    tensor: Tensor,
    dst: int,
    group: ProcessGroup | None = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "send",
    debug: str | None = None,
) -> None:
    """Send to global rank `dst` and wait until it is sent."""
    _run(_SEND, (tensor, dst, group, tag), tensor, group, False, (prof, log_name, debug))


def recv(
    tensor: Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "recv",
    debug: str | None = None,
) -> int:
    """Receive from global rank `src`, or from any rank; the sender's rank."""
    return _run(  # type: ignore[no-any-return]
        _RECV, (tensor, src, group, tag), tensor, group, False, (prof, log_name, debug)
    )


def isend(
    tensor: Tensor,
    dst: int,
    group: ProcessGroup | None = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "isend",
    debug: str | None = None,
) -> CollectiveWork | None:
    """Begin to send to global rank `dst`; the tensor must not change before the handle was waited for."""
    return _begin(_ISEND, (tensor, dst, group, tag), tensor, group, True, (prof, log_name, debug))


def irecv(
    tensor: Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "irecv",
    debug: str | None = None,
) -> CollectiveWork | None:
    """Begin to receive from global rank `src`, or from any rank."""
    return _begin(_IRECV, (tensor, src, group, tag), tensor, group, True, (prof, log_name, debug))


def _torch_op(op: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function for ours; torch itself refuses any other."""
    return {isend: td.isend, irecv: td.irecv}.get(op, op)


class P2POp(td.P2POp):
    """One send or receive of a batch; `op` is `isend` or `irecv`, this package's or torch's."""

    def __new__(
        cls,
        op: Callable[..., Any],
        tensor: Tensor,
        peer: int,
        group: ProcessGroup | None = None,
        tag: int = 0,
    ) -> P2POp:
        return super().__new__(cls, _torch_op(op), tensor, peer, group, tag)  # type: ignore[no-any-return]

    def __init__(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(_torch_op(op), *args, **kwargs)


def batch_isend_irecv(
    p2p_op_list: list[td.P2POp],
    prof: bool = False,
    log_name: str = "batch_isend_irecv",
    debug: str | None = None,
) -> list[CollectiveWork]:
    """Begin all sends and receives of the list; one handle each, or one for all where the backend fuses them."""
    if not p2p_op_list:
        raise CommError("batch_isend_irecv got an empty list. Give it at least one P2POp.")
    tensors = [op.tensor for op in p2p_op_list]
    group = p2p_op_list[0].group
    return _run(_BATCH, (p2p_op_list,), tensors, group, True, (prof, log_name, debug))  # type: ignore[no-any-return]


_SENT, _RECEIVED = (False, "isend", None), (False, "irecv", None)


def _send(tensor: Tensor, peer: int, group: ProcessGroup, place: int, tag: int) -> Any:
    return group.send([tensor], place, tag)


def _receive(tensor: Tensor, peer: int, group: ProcessGroup, place: int, tag: int) -> Any:
    return group.recv([tensor], place, tag)


_LINE_SEND = CommOperation("isend", _send, p2p=True, peer=1, free=True)
_LINE_RECEIVE = CommOperation("irecv", _receive, p2p=True, peer=1, free=True)


class PeerChannel:
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
        return DEFAULT.begin(_LINE_SEND, self._state, tensor, label, way)  # type: ignore[no-any-return]

    def receive(self, tensor: Tensor, label: str) -> CollectiveWork | None:
        """Begin to receive."""
        if DEFAULT.events.wanted or self._state.off:
            with labelled(label):
                args = (tensor, self._peer, self._group, self._tag)
                return DEFAULT.run(_IRECV, args, tensor, self._group, True, _RECEIVED)  # type: ignore[no-any-return]
        way = (tensor, self._peer, self._group, self._place, self._tag)
        return DEFAULT.begin(_LINE_RECEIVE, self._state, tensor, label, way)  # type: ignore[no-any-return]


_TAGS = 1 << 12  # of gathers that may be under way between two ranks
_counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _gather(output: Tensor, part: Tensor, group: Any, async_op: bool) -> AllOf | None:
    size, rank, length = group.size(), group.rank(), part.numel()
    tag = _counts[group] = (_counts.get(group, 0) + 1) % _TAGS
    mine = output.narrow(0, rank * length, length)
    if mine.data_ptr() != part.data_ptr():
        mine.copy_(part)
    works = []
    for step in range(1, size):
        source, target = (rank + step) % size, (rank - step) % size
        works.append(group.recv([output.narrow(0, source * length, length)], source, tag))
        works.append(group.send([mine], target, tag))
    done = AllOf(works, DEFAULT.limit)
    if async_op:
        return done
    done.wait()
    return None


_GATHER = CommOperation("gather_parts", _gather)


def gather_parts(
    output: Tensor, part: Tensor, group: td.ProcessGroup | None = None, async_op: bool = False
) -> CollectiveWork | None:
    """Fill the flat host tensor `output` with the `part` of every rank, in the order of the ranks; over gloo."""
    real: Any = td.group.WORLD if group is None else group
    args = (output, part, real, async_op)
    return _begin(_GATHER, args, part, group, async_op, (False, "gather_parts", None))
