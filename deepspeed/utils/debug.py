"""Names of modules and parameters for messages while debugging, and messages that do not run into each other."""

from __future__ import annotations

import fcntl
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from deepspeed import comm

__all__ = [
    "WeakIdNameMap",
    "debug_clear_module_and_param_names",
    "debug_extract_module_and_param_names",
    "debug_module2name",
    "debug_module2name_class",
    "debug_module2name_id",
    "debug_param2name",
    "debug_param2name_id",
    "debug_param2name_id_numel",
    "debug_param2name_id_shape",
    "debug_param2name_id_shape_device",
    "debug_param2name_id_shape_status",
    "ds_id",
    "ds_shape",
    "log_rank_file",
    "print_backward_tensors",
    "print_rank",
    "print_rank0",
    "printflock",
]


class WeakIdNameMap:
    """Names by object, without keeping any object alive."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[weakref.ref[Any], str]] = {}

    def __setitem__(self, item: Any, name: str) -> None:
        key = id(item)
        self._names[key] = (weakref.ref(item, lambda _: self._names.pop(key, None)), name)

    def get(self, item: Any, default: str = "unknown") -> str:
        """The name of this very object."""
        found = self._names.get(id(item))
        return found[1] if found is not None else default

    def __len__(self) -> int:
        return len(self._names)

    def clear(self) -> None:
        """Forget all names."""
        self._names.clear()


_MODULES, _PARAMS = WeakIdNameMap(), WeakIdNameMap()


def debug_clear_module_and_param_names() -> None:
    """Forget the names of all models."""
    _MODULES.clear()
    _PARAMS.clear()


def debug_extract_module_and_param_names(model: nn.Module) -> None:
    """Learn the names in a model, in place of those of an earlier one."""
    debug_clear_module_and_param_names()
    for name, module in model.named_modules():
        _MODULES[module] = name
    for name, param in model.named_parameters():
        _PARAMS[param] = name


def debug_module2name(module: nn.Module) -> str:
    """The module's name in its model."""
    return _MODULES.get(module)


def debug_module2name_id(module: nn.Module) -> str:
    """Its name and its number among the modules that gather parameters."""
    return f"name={debug_module2name(module)} id={getattr(module, 'ds_id', 'none')}"


def debug_module2name_class(module: nn.Module) -> str:
    """Its name and class."""
    return f"name={debug_module2name(module)} {type(module).__name__}"


def debug_param2name(param: Tensor) -> str:
    """The parameter's name in its model."""
    return _PARAMS.get(param)


def ds_id(param: Tensor) -> Any:
    """The number of a sharded parameter; "none" for another."""
    return getattr(param, "ds_id", "none")


def ds_shape(param: Tensor) -> Any:
    """The shape of the whole parameter."""
    return getattr(param, "ds_shape", param.shape)


def debug_param2name_id(param: Tensor) -> str:
    """Name and number."""
    return f"name={debug_param2name(param)} id={ds_id(param)}"


def debug_param2name_id_numel(param: Tensor) -> str:
    """Name, number and elements."""
    return f"{debug_param2name_id(param)} numel={param.numel()}"


def debug_param2name_id_shape(param: Tensor) -> str:
    """Name, number and whole shape."""
    return f"{debug_param2name_id(param)} shape={ds_shape(param)}"


def debug_param2name_id_shape_device(param: Tensor) -> str:
    """Name, number, whole shape and device."""
    return f"{debug_param2name_id_shape(param)} device={param.device}"


def debug_param2name_id_shape_status(param: Tensor) -> str:
    """Name, number, whole shape and whether it is whole at the moment."""
    return f"{debug_param2name_id_shape(param)} status={getattr(param, 'ds_status', 'none')}"


def printflock(*msgs: Any) -> None:
    """Write a line that lines of other ranks on this machine do not run into."""
    with open(__file__, encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            sys.stdout.write(" ".join(map(str, msgs)) + "\n")
            sys.stdout.flush()
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)


def _rank() -> int:
    return comm.get_rank() if comm.is_initialized() else 0


def print_rank(*msg: Any, force: bool = False) -> None:
    """Write a line with this rank in front, if `force`: calls stay in the code for the day they are needed."""
    if force:
        printflock(f"[{_rank()}]", *msg)


def print_rank0(*msg: Any, force: bool = False) -> None:
    """As `print_rank`, on rank 0 only."""
    if _rank() == 0:
        print_rank(*msg, force=force)


def log_rank_file(rank: int, *msgs: Any) -> None:
    """Append lines to `debug_rank<rank>.txt` in the working directory."""
    with Path(f"debug_rank{rank}.txt").open("a", encoding="utf-8") as file:
        file.writelines(f"{msg}\n" for msg in msgs)


def print_backward_tensors(tensor: Tensor) -> None:
    """Write the functions that backward of this tensor goes through, and the tensors at their ends."""
    for function in _functions(tensor.grad_fn):
        end = getattr(function, "variable", None)
        told = "" if end is None else f" → {tuple(end.shape)} {end.dtype}"
        printflock(f"{type(function).__name__}{told}")


def _functions(first: Any) -> Iterator[Any]:
    seen: set[Any] = set()
    waiting = [first]
    while waiting:
        function = waiting.pop(0)
        if function is None or function in seen:
            continue
        seen.add(function)
        yield function
        waiting.extend(following for following, _ in function.next_functions)
