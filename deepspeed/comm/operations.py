"""The table of operations: which torch function each one is, what kind, and which switch turns it off.

[Note: direct calls] torch's own functions check again what the backend checks, and build their arguments from scratch;
for small tensors that costs more than this package's recorder. The operations that training lives on go straight to the
group. What is out of the ordinary (a subclass, a mode, complex numbers, a batch being coalesced, a rank of another
group) goes to torch's functions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as td
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from deepspeed.comm.shared_memory import SharedGroup, shared_group
from deepspeed.errors import CommError

if TYPE_CHECKING:
    from torch.distributed import ReduceOp as ReduceOp
else:

    class ReduceOp(td.ReduceOp):
        """torch's reductions (the very same members) and UNUSED, which no backend carries out."""

        # torch's C++ enum has it right after its last public member but does not export it to Python.
        UNUSED = td.ReduceOp.RedOpType(len(td.ReduceOp.RedOpType.__members__))


_GATHER = "all_gather_single" if hasattr(td.ProcessGroup, "all_gather_single") else "_allgather_base"
_SCATTER = "reduce_scatter_single" if hasattr(td.ProcessGroup, "reduce_scatter_single") else "_reduce_scatter_base"
_gather: Callable[..., Any] = getattr(td.ProcessGroup, _GATHER)
_scatter: Callable[..., Any] = getattr(td.ProcessGroup, _SCATTER)


_PLAIN_OP = type(td.ReduceOp.SUM)  # a factor, which an operation may carry, is not plain
_modes: Callable[[], int] = torch._C._len_torch_function_stack


def _is_plain(one: Any, other: Any, group: Any) -> bool:
    return (
        type(one) is Tensor
        and type(other) is Tensor
        and type(group) is td.ProcessGroup
        and not one.dtype.is_complex
        and not _modes()
        and not c10d._world.pg_coalesce_state
    )


def _waited(work: Any, async_op: bool) -> Any:
    if async_op:
        return work
    if work is not None:
        work.wait()
    return None


def gather_single(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """`all_gather_into_tensor(output, input, group, async_op)`; `otherwise` is torch's own."""
    options = {}  # only read by the backends, so that one of each will do
    for kind in (False, True):
        options[kind] = c10d.AllgatherOptions()  # type: ignore[attr-defined]
        options[kind].asyncOp = kind

    def gather(output: Tensor, tensor: Tensor, group: Any, async_op: bool) -> Any:
        real = td.GroupMember.WORLD if group is None else group
        if not _is_plain(output, tensor, real):
            return otherwise(output, tensor, group, async_op)
        shared = shared_group(real, tensor, tensor.nbytes, blocks=not async_op)
        if shared is not None and tensor.is_contiguous() and output.is_contiguous():
            return _waited(shared.gather(output, tensor), async_op)
        return _waited(_gather(real, output, tensor, options[async_op]), async_op)

    return gather


def _begin_all_reduce(group: Any, tensor: Tensor, options: Any) -> Any:
    return group.allreduce([tensor], options)


def _share_all(shared: SharedGroup, tensors: list[Tensor], op: Any) -> Any:
    return shared.all_reduce(tensors[0], op) if shared.reads_all else None


def _share_parts(shared: SharedGroup, tensors: list[Tensor], op: Any) -> Any:
    return shared.scatter(tensors[0], tensors[1], op)


def _reducing(
    begin: Callable[..., Any], through: Callable[..., Any], kind: Any, otherwise: Callable[..., Any]
) -> Callable[..., Any]:
    """`all_reduce(tensor, …)` or `reduce_scatter_tensor(output, tensor, op, group, async_op)`.

    The group does it by `begin`, or `through` memory that its ranks share; `otherwise` is torch's own.
    """
    known: dict[tuple[Any, bool], Any] = {}

    def reduce(*args: Any) -> Any:
        *tensors, op, group, async_op = args
        real = td.GroupMember.WORLD if group is None else group
        if type(op) is not _PLAIN_OP or not _is_plain(tensors[0], tensors[-1], real):
            return otherwise(*args)
        options = known.get((op, async_op))
        if options is None:
            options = known[op, async_op] = kind()
            options.reduceOp = op
            options.asyncOp = async_op
        shared = shared_group(real, tensors[-1], tensors[-1].nbytes, op, blocks=not async_op)
        if shared is not None and all(tensor.is_contiguous() for tensor in tensors):
            work = through(shared, tensors, op)
            if work is not None:
                return _waited(work, async_op)
        return _waited(begin(real, *tensors, options), async_op)

    return reduce


def message(begin: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """`isend` or `irecv(tensor, peer, group, tag)`, which `begin` of a group does; `otherwise` is torch's own."""

    def start(tensor: Tensor, peer: int | None, group: Any = None, tag: int = 0) -> Any:
        real: Any = td.GroupMember.WORLD if group is None else group
        places: dict[int | None, int] = c10d._world.pg_group_ranks.get(real, {})  # type: ignore[assignment]
        place = places.get(peer) if _is_plain(tensor, tensor, real) else None
        return otherwise(tensor, peer, group, tag) if place is None else begin(real, [tensor], place, tag)

    return start


@dataclass(frozen=True, slots=True, eq=False)
class CommOperation:
    """One kind of communication as the dispatcher sees it.

    `p2p` operations are numbered apart from collectives, since not all ranks of a group take part in them.
    `peer` is the position of the root or peer rank among the arguments of `call`.
    `free` operations return handles that complete only once another rank, or a later call of this one, does its
    part, so measuring them must not wait for them at once. Listeners are called for `timed` ones only.
    """

    name: str
    call: Callable[..., Any]
    p2p: bool = False
    peer: int | None = None
    free: bool = False
    timed: bool = True


def _torch(*names: str) -> Callable[..., Any]:
    """The torch function under the first of its names that this torch has, newest first: old names warn.

    It is taken out of torch's failure logger, a wrapper that costs about as much as this package's recorder and tells
    less than the errors which the dispatcher raises.
    """
    function: Any = next(getattr(td, name) for name in names if name in vars(td))
    inner = getattr(function, "__wrapped__", None)
    if inner is not None and function.__code__.co_filename.endswith("c10d_logger.py"):
        return inner  # type: ignore[no-any-return]
    return function  # type: ignore[no-any-return]


_ALL = (
    CommOperation("all_reduce", _reducing(_begin_all_reduce, _share_all, td.AllreduceOptions, _torch("all_reduce"))),
    CommOperation("inference_all_reduce", _torch("all_reduce")),
    CommOperation("broadcast", _torch("broadcast"), peer=1),
    CommOperation("reduce", _torch("reduce"), peer=1),
    CommOperation("all_gather", _torch("all_gather")),
    CommOperation("all_gather_into_tensor", gather_single(_torch("all_gather_single", "all_gather_into_tensor"))),
    CommOperation("reduce_scatter", _torch("reduce_scatter")),
    CommOperation(
        "reduce_scatter_tensor",
        _reducing(
            _scatter,
            _share_parts,
            td.ReduceScatterOptions,
            _torch("reduce_scatter_single", "reduce_scatter_tensor"),
        ),
    ),
    CommOperation("all_to_all", _torch("all_to_all")),
    CommOperation("all_to_all_single", _torch("all_to_all_single")),
    CommOperation("gather", _torch("gather"), peer=2),
    CommOperation("scatter", _torch("scatter"), peer=2),
    CommOperation("barrier", _torch("barrier")),
    CommOperation("monitored_barrier", _torch("monitored_barrier")),
    CommOperation("broadcast_object_list", _torch("broadcast_object_list"), peer=1),
    CommOperation("all_gather_object", _torch("all_gather_object")),
    CommOperation("send", _torch("send"), p2p=True, peer=1),
    CommOperation("recv", _torch("recv"), p2p=True, peer=1),
    CommOperation("isend", message(td.ProcessGroup.send, _torch("isend")), p2p=True, peer=1, free=True),
    CommOperation("irecv", message(td.ProcessGroup.recv, _torch("irecv")), p2p=True, peer=1, free=True),
    CommOperation("batch_isend_irecv", _torch("batch_isend_irecv"), p2p=True, free=True),
)
OPERATIONS: Mapping[str, CommOperation] = {operation.name: operation for operation in _ALL}

_SWITCHES: Mapping[str, tuple[str, ...]] = {
    "DS_COMM_ALL_GATHER_OFF": ("all_gather", "all_gather_into_tensor", "all_gather_coalesced"),
    "DS_COMM_REDUCE_SCATTER_OFF": ("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_coalesced"),
    "DS_COMM_BROADCAST_OFF": ("broadcast", "broadcast_coalesced"),
    "DS_COMM_ALL_REDUCE_OFF": ("all_reduce", "inference_all_reduce", "all_reduce_coalesced"),
    "DS_COMM_REDUCE_OFF": ("reduce",),
}
_ON = ("1", "true", "on", "yes")
_OFF = ("", "0", "false", "off", "no")


def switched_off(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Operation name → the environment variable that switches it off; usually empty."""
    env = os.environ if environ is None else environ
    off: dict[str, str] = {}
    for variable, names in _SWITCHES.items():
        value = env.get(variable, "").strip().lower()
        if value in _ON:
            off.update(dict.fromkeys(names, variable))
        elif value not in _OFF:
            raise CommError(
                f"{variable}={env[variable]!r} is neither on nor off. "
                f"Set it to 1 to skip {', '.join(names)}, or to 0 or nothing to run them."
            )
    return off
