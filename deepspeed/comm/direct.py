"""The operations that training lives on, without the parts of torch's functions that a plain call does not need.

torch's own functions check again what the backend checks, and build their arguments from scratch; for small tensors
that costs more than this package's recorder. What is out of the ordinary (a subclass, a mode, complex numbers, a batch
being coalesced, a rank of another group) goes to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as td
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

__all__ = ["all_reduce", "gather_single", "receiving", "scatter_single", "sending"]

_GATHER = "all_gather_single" if hasattr(td.ProcessGroup, "all_gather_single") else "_allgather_base"
_SCATTER = "reduce_scatter_single" if hasattr(td.ProcessGroup, "reduce_scatter_single") else "_reduce_scatter_base"
_gather: Callable[..., Any] = getattr(td.ProcessGroup, _GATHER)
_scatter: Callable[..., Any] = getattr(td.ProcessGroup, _SCATTER)


_PLAIN_OP = type(td.ReduceOp.SUM)  # a factor, which an operation may carry, is not plain
_modes: Callable[[], int] = torch._C._len_torch_function_stack


def _gathering(async_op: bool) -> Any:
    options = c10d.AllgatherOptions()  # type: ignore[attr-defined]
    options.asyncOp = async_op
    return options


# Options are only read by the backends, so that one of each will do.
_GATHERING = (_gathering(False), _gathering(True))


def _is_plain(one: Any, other: Any) -> bool:
    return (
        type(one) is Tensor
        and type(other) is Tensor
        and not one.dtype.is_complex
        and not _modes()
        and not c10d._world.pg_coalesce_state
    )


def gather_single(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """`all_gather_into_tensor(output, input, group, async_op)`; `otherwise` is torch's own."""

    def gather(output: Tensor, tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        real = td.GroupMember.WORLD if group is None else group
        if not _is_plain(output, tensor) or type(real) is not td.ProcessGroup:
            return otherwise(output, tensor, group, async_op)
        work = _gather(real, output, tensor, _GATHERING[async_op])
        if async_op:
            return work
        if work is not None:
            work.wait()
        return None

    return gather


def scatter_single(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """`reduce_scatter_tensor(output, input, op, group, async_op)`; `otherwise` is torch's own."""
    known: dict[tuple[Any, bool], Any] = {}

    def scatter(
        output: Tensor, tensor: Tensor, op: Any = td.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        real = td.GroupMember.WORLD if group is None else group
        if type(op) is not _PLAIN_OP or not _is_plain(output, tensor) or type(real) is not td.ProcessGroup:
            return otherwise(output, tensor, op, group, async_op)
        options = known.get((op, async_op))
        if options is None:
            options = known[op, async_op] = _reducing(td.ReduceScatterOptions(), op, async_op)
        work = _scatter(real, output, tensor, options)
        if async_op:
            return work
        if work is not None:
            work.wait()
        return None

    return scatter


def all_reduce(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """`all_reduce(tensor, op, group, async_op)`; `otherwise` is torch's own."""
    known: dict[tuple[Any, bool], Any] = {}

    def reduce(tensor: Tensor, op: Any = td.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        real = td.GroupMember.WORLD if group is None else group
        if type(op) is not _PLAIN_OP or not _is_plain(tensor, tensor) or type(real) is not td.ProcessGroup:
            return otherwise(tensor, op, group, async_op)
        options = known.get((op, async_op))
        if options is None:
            options = known[op, async_op] = _reducing(td.AllreduceOptions(), op, async_op)
        work = real.allreduce([tensor], options)
        if async_op:
            return work
        if work is not None:
            work.wait()
        return None

    return reduce


def sending(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """`isend(tensor, dst, group, tag)`; `otherwise` is torch's own."""
    return _message(td.ProcessGroup.send, otherwise)


def receiving(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """`irecv(tensor, src, group, tag)`; `otherwise` is torch's own."""
    return _message(td.ProcessGroup.recv, otherwise)


def _message(begin: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    def message(tensor: Tensor, peer: int | None, group: Any = None, tag: int = 0) -> Any:
        real = td.GroupMember.WORLD if group is None else group
        if not _is_plain(tensor, tensor) or type(real) is not td.ProcessGroup:
            return otherwise(tensor, peer, group, tag)
        places: dict[int | None, int] = c10d._world.pg_group_ranks.get(real, {})  # type: ignore[assignment]
        place = places.get(peer)
        return otherwise(tensor, peer, group, tag) if place is None else begin(real, [tensor], place, tag)

    return message


def _reducing(options: Any, op: Any, async_op: bool) -> Any:
    options.reduceOp = op
    options.asyncOp = async_op
    return options
