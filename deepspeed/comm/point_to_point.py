"""Sends and receives between two ranks, one by one or in a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as td
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed.comm.dispatch import DEFAULT
from deepspeed.comm.operations import OPERATIONS
from deepspeed.comm.pending import CollectiveWork
from deepspeed.errors import CommError

__all__ = ["P2POp", "batch_isend_irecv", "irecv", "isend", "recv", "send"]

_SEND = OPERATIONS["send"]
_RECV = OPERATIONS["recv"]
_ISEND = OPERATIONS["isend"]
_IRECV = OPERATIONS["irecv"]
_BATCH = OPERATIONS["batch_isend_irecv"]

_run = DEFAULT.run


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
    """Receive from global rank `src`, or from whoever sends; the sender's rank."""
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
    return _run(  # type: ignore[no-any-return]
        _ISEND, (tensor, dst, group, tag), tensor, group, True, (prof, log_name, debug)
    )


def irecv(
    tensor: Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "irecv",
    debug: str | None = None,
) -> CollectiveWork | None:
    """Begin to receive from global rank `src`, or from whoever sends."""
    return _run(  # type: ignore[no-any-return]
        _IRECV, (tensor, src, group, tag), tensor, group, True, (prof, log_name, debug)
    )


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

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: Tensor,
        peer: int,
        group: ProcessGroup | None = None,
        tag: int = 0,
    ) -> None:
        super().__init__(_torch_op(op), tensor, peer, group, tag)


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
