"""The collectives of `deepspeed.comm`: torch's signatures and three keywords for the logger, each one dispatched call.

`prof=True` records this call even where the logger does not record all; `log_name` is the name it is recorded under;
`debug` is the caller's name in the logger's debug mode, by default that of the calling function.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed.comm.dispatch import DEFAULT
from deepspeed.comm.operations import OPERATIONS, ReduceOp
from deepspeed.comm.pending import CollectiveWork

_ALL_REDUCE = OPERATIONS["all_reduce"]
_INFERENCE_ALL_REDUCE = OPERATIONS["inference_all_reduce"]
_BROADCAST = OPERATIONS["broadcast"]
_REDUCE = OPERATIONS["reduce"]
_ALL_GATHER = OPERATIONS["all_gather"]
_GATHER_INTO = OPERATIONS["all_gather_into_tensor"]
_REDUCE_SCATTER = OPERATIONS["reduce_scatter"]
_SCATTER_FROM = OPERATIONS["reduce_scatter_tensor"]
_ALL_TO_ALL = OPERATIONS["all_to_all"]
_ALL_TO_ALL_SINGLE = OPERATIONS["all_to_all_single"]
_GATHER = OPERATIONS["gather"]
_SCATTER = OPERATIONS["scatter"]
_BARRIER = OPERATIONS["barrier"]
_MONITORED_BARRIER = OPERATIONS["monitored_barrier"]
_BROADCAST_OBJECT_LIST = OPERATIONS["broadcast_object_list"]
_ALL_GATHER_OBJECT = OPERATIONS["all_gather_object"]

_run: Callable[..., CollectiveWork | None] = DEFAULT.run


def all_reduce(
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: str | None = None,
) -> CollectiveWork | None:
    """Reduce over the group, in place, on every rank."""
    return _run(_ALL_REDUCE, (tensor, op, group, async_op), tensor, group, async_op, (prof, log_name, debug))


def inference_all_reduce(
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: str | None = None,
) -> CollectiveWork | None:
    """As `all_reduce`; the name under which inference layers call it."""
    return _run(_INFERENCE_ALL_REDUCE, (tensor, op, group, async_op), tensor, group, async_op, (prof, log_name, debug))


def broadcast(
    tensor: Tensor,
    src: int,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "broadcast",
    debug: str | None = None,
) -> CollectiveWork | None:
    """Copy the tensor of global rank `src` to every rank of the group."""
    return _run(_BROADCAST, (tensor, src, group, async_op), tensor, group, async_op, (prof, log_name, debug))


def reduce(
    tensor: Tensor,
    dst: int,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce",
    debug: str | None = None,
) -> CollectiveWork | None:
    """Reduce over the group onto global rank `dst`."""
    return _run(_REDUCE, (tensor, dst, op, group, async_op), tensor, group, async_op, (prof, log_name, debug))


def all_gather(
    tensor_list: list[Tensor],
    tensor: Tensor,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_gather",
    debug: str | None = None,
) -> CollectiveWork | None:
    """Gather every rank's tensor into a list, one tensor per rank."""
    return _run(_ALL_GATHER, (tensor_list, tensor, group, async_op), tensor, group, async_op, (prof, log_name, debug))


def all_gather_into_tensor(
    output_tensor: Tensor,
    tensor: Tensor,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_gather_into_tensor",
    debug: str | None = None,
) -> CollectiveWork | None:
    """Gather every rank's tensor into one, concatenated or stacked by rank."""
    args = (output_tensor, tensor, group, async_op)
    return _run(_GATHER_INTO, args, tensor, group, async_op, (prof, log_name, debug))


def allgather_fn(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    debug: str | None = None,
) -> CollectiveWork | None:
    """As `all_gather_into_tensor`."""
    args = (output_tensor, input_tensor, group, async_op)
    return _run(_GATHER_INTO, args, input_tensor, group, async_op, (False, "all_gather_into_tensor", debug))


def reduce_scatter(
    output: Tensor,
    input_list: list[Tensor],
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce_scatter",
    debug: str | None = None,
) -> CollectiveWork | None:
    """Reduce a list of one tensor per rank; each rank gets the one of its own number."""
    args = (output, input_list, op, group, async_op)
    return _run(_REDUCE_SCATTER, args, output, group, async_op, (prof, log_name, debug))


def reduce_scatter_tensor(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce_scatter_tensor",
    debug: str | None = None,
) -> CollectiveWork | None:
    """Reduce a tensor; each rank gets its shard of it."""
    args = (output_tensor, tensor, op, group, async_op)
    return _run(_SCATTER_FROM, args, output_tensor, group, async_op, (prof, log_name, debug))


def reduce_scatter_fn(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    prof: bool = False,
    debug: str | None = None,
) -> CollectiveWork | None:
    args = (output_tensor, tensor, op, group, async_op)
    return _run(_SCATTER_FROM, args, output_tensor, group, async_op, (prof, "reduce_scatter_tensor", debug))


def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_to_all",
    debug: str | None = None,
) -> CollectiveWork | None:
    """Send the i-th tensor to rank i of the group and receive one from each."""
    args = (output_tensor_list, input_tensor_list, group, async_op)
    return _run(_ALL_TO_ALL, args, input_tensor_list, group, async_op, (prof, log_name, debug))


def all_to_all_single(
    output: Tensor,
    tensor: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_to_all_single",
    debug: str | None = None,
) -> CollectiveWork | None:
    """Split a tensor along its first dim, send a part to each rank, concatenate what comes."""
    args = (output, tensor, output_split_sizes, input_split_sizes, group, async_op)
    return _run(_ALL_TO_ALL_SINGLE, args, tensor, group, async_op, (prof, log_name, debug))


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int = 0,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "gather",
    debug: str | None = None,
) -> CollectiveWork | None:
    """Gather every rank's tensor into a list on global rank `dst`."""
    return _run(_GATHER, (tensor, gather_list, dst, group, async_op), tensor, group, async_op, (prof, log_name, debug))


def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int = 0,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "scatter",
    debug: str | None = None,
) -> CollectiveWork | None:
    """Give each rank one tensor of the list of global rank `src`."""
    args = (tensor, scatter_list, src, group, async_op)
    return _run(_SCATTER, args, tensor, group, async_op, (prof, log_name, debug))


def barrier(
    group: ProcessGroup | None = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    prof: bool = False,
    log_name: str = "barrier",
    debug: str | None = None,
) -> CollectiveWork | None:
    """Wait until every rank of the group is here."""
    return _run(_BARRIER, (group, async_op, device_ids), None, group, async_op, (prof, log_name, debug))


def monitored_barrier(
    group: ProcessGroup | None = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
    prof: bool = False,
    log_name: str = "monitored_barrier",
    debug: str | None = None,
) -> None:
    """A gloo barrier that names the ranks which do not come within `timeout`."""
    _run(_MONITORED_BARRIER, (group, timeout, wait_all_ranks), None, group, False, (prof, log_name, debug))


def broadcast_object_list(
    object_list: list[Any],
    src: int,
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    prof: bool = False,
    log_name: str = "broadcast_object_list",
    debug: str | None = None,
) -> None:
    """Replace the list's objects, on every rank, by those of global rank `src`."""
    _run(_BROADCAST_OBJECT_LIST, (object_list, src, group, device), None, group, False, (prof, log_name, debug))


def all_gather_object(
    object_list: list[Any],
    obj: Any,
    group: ProcessGroup | None = None,
    prof: bool = False,
    log_name: str = "all_gather_object",
    debug: str | None = None,
) -> None:
    """Gather every rank's object into a list, one object per rank."""
    _run(_ALL_GATHER_OBJECT, (object_list, obj, group), None, group, False, (prof, log_name, debug))
