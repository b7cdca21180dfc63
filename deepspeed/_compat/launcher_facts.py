"""Ranks as a launcher tells them, and what the arguments of a collective say about its size."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from deepspeed.comm.discover import RankFacts, discover
from deepspeed.comm.init import DEFAULT_PORT
from deepspeed.comm.statistics import get_caller_func

__all__ = [
    "get_debug_log_name",
    "get_default_args",
    "get_local_rank_from_launcher",
    "get_msg_size_from_args",
    "get_tensor_kwarg",
    "get_tensor_position",
    "get_world_rank_from_launcher",
    "get_world_size_from_launcher",
]

# Parameters that hold what a collective sends, in the order in which they are looked for.
_TENSORS = ("tensor_list", "input_tensor_list", "input_list", "input_tensors", "tensors", "input_tensor", "tensor")


def _facts() -> RankFacts:
    return discover(os.environ, port=DEFAULT_PORT, need_master=False)


def get_local_rank_from_launcher() -> int:
    """This process among those of its node, as its launcher says; 0 without one."""
    return _facts().local_rank or 0


def get_world_rank_from_launcher() -> int:
    """This process among all, as its launcher says; 0 without one."""
    return _facts().rank


def get_world_size_from_launcher() -> int:
    """How many processes the launcher started; 1 without one."""
    return _facts().world_size


def get_default_args(func: Callable[..., Any]) -> dict[str, Any]:
    """The defaults of a function's parameters."""
    parameters = inspect.signature(func).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty}


def get_tensor_position(func: Callable[..., Any]) -> int:
    """The place of the parameter that holds what a collective sends; -1 if it has none."""
    names = list(inspect.signature(func).parameters)
    return next((names.index(name) for name in _TENSORS if name in names), -1)


def get_tensor_kwarg(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    """What a collective sends, among its keyword arguments and defaults; None if it is not there."""
    given = {**get_default_args(func), **kwargs}
    return next((given[name] for name in _TENSORS if name in given), None)


def get_msg_size_from_args(func: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """The bytes that a call of a collective sends; 0 if it sends no tensor."""
    place = get_tensor_position(func)
    sent = args[place] if 0 <= place < len(args) else get_tensor_kwarg(func, kwargs)
    tensors = sent if isinstance(sent, Sequence) else [sent]
    return sum(each.numel() * each.element_size() for each in tensors if isinstance(each, Tensor))


def get_debug_log_name(func_args: Mapping[str, Any], debug: bool) -> str:
    """The name under which a call is recorded; with its caller's if `debug`."""
    name = str(func_args["log_name"])
    return f"{name} | [Caller Func: {func_args.get('debug') or get_caller_func()}]" if debug else name
