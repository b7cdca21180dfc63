"""The table of operations: which torch function each one is, what kind, and which switch turns it off."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as td

from deepspeed.comm.direct import all_reduce, gather_single, receiving, scatter_single, sending
from deepspeed.errors import CommError

__all__ = ["OPERATIONS", "Operation", "switched_off"]


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One kind of communication as the dispatcher sees it.

    `p2p` operations are numbered apart from collectives, since not all ranks of a group take part in them.
    `peer` is the position of the root or peer rank among the arguments of `call`.
    `free` operations return handles that complete only once another rank, or a later call of this one, does its
    part, so measuring them must not wait for them at once. Only `timed` ones are told to listeners.
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


def _table(*operations: Operation) -> dict[str, Operation]:
    return {operation.name: operation for operation in operations}


OPERATIONS: Mapping[str, Operation] = _table(
    Operation("all_reduce", all_reduce(_torch("all_reduce"))),
    Operation("inference_all_reduce", _torch("all_reduce")),
    Operation("broadcast", _torch("broadcast"), peer=1),
    Operation("reduce", _torch("reduce"), peer=1),
    Operation("all_gather", _torch("all_gather")),
    Operation("all_gather_into_tensor", gather_single(_torch("all_gather_single", "all_gather_into_tensor"))),
    Operation("reduce_scatter", _torch("reduce_scatter")),
    Operation("reduce_scatter_tensor", scatter_single(_torch("reduce_scatter_single", "reduce_scatter_tensor"))),
    Operation("all_to_all", _torch("all_to_all")),
    Operation("all_to_all_single", _torch("all_to_all_single")),
    Operation("gather", _torch("gather"), peer=2),
    Operation("scatter", _torch("scatter"), peer=2),
    Operation("barrier", _torch("barrier")),
    Operation("monitored_barrier", _torch("monitored_barrier")),
    Operation("broadcast_object_list", _torch("broadcast_object_list"), peer=1),
    Operation("all_gather_object", _torch("all_gather_object")),
    Operation("send", _torch("send"), p2p=True, peer=1),
    Operation("recv", _torch("recv"), p2p=True, peer=1),
    Operation("isend", sending(_torch("isend")), p2p=True, peer=1, free=True),
    Operation("irecv", receiving(_torch("irecv")), p2p=True, peer=1, free=True),
    Operation("batch_isend_irecv", _torch("batch_isend_irecv"), p2p=True, free=True),
)

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
