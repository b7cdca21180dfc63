"""Parameters whose update is still on its way: what uses one waits for it, and nothing else does.

[Note: late parameters] Until its new values are queued on the device, a parameter has another class: any function of
torch that is given it, and any attribute that reads its values, waits first. Modules wait for their own parameters
before they run, since kernels of other libraries do not ask for a class. Waiting gives the class back.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

# Attributes of a tensor that give access to its values; all others only describe it.
_READS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
_DESCRIBES = frozenset(
    {"__hash__", "__format__", "is_floating_point", "is_complex", "register_hook", "requires_grad_", "size", "dim"}
    | {"register_post_accumulate_grad_hook", "retain_grad", "numel", "nelement", "stride", "element_size", "ndimension"}
    | {"is_contiguous", "__len__"}
)


class PendingUpdate(Protocol):
    """What a parameter waits for."""

    def wait(self) -> None:
        """Return when the new values are where the parameter is used, or queued there."""

    def settle(self) -> None:
        """As `wait`; and nothing uses the memory of states and gradients any more."""


class LateParameter:
    """Base of the classes that parameters have while their update is on its way."""

    _update: PendingUpdate

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch; what it reads arrives first."""
        kwargs = kwargs or {}
        if not _describes(func):
            for param in filter(is_late, tree_leaves((args, kwargs))):
                arrive(param)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        arrive(self)  # type: ignore[arg-type]
        return self.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        arrive(self)  # type: ignore[arg-type]
        return self.__deepcopy__(memo)


def is_late(param: object) -> bool:
    """True if an update of the parameter is still on its way."""
    return isinstance(param, LateParameter)


def postpone(param: nn.Parameter, update: PendingUpdate) -> None:
    """Let whoever uses the parameter wait for `update`."""
    param.__class__ = _late(type(param))
    param._update = update  # type: ignore[attr-defined]


def arrive(param: nn.Parameter) -> None:
    """Wait for the parameter's update; it is an ordinary one again then."""
    if is_late(param):
        update: PendingUpdate = param._update  # type: ignore[attr-defined]
        param.__class__ = type(param).__mro__[2]
        del param._update  # type: ignore[attr-defined]
        update.wait()


def wait_in_modules(root: nn.Module, stack: ExitStack) -> None:
    """Let every module wait for its own parameters before it runs, until the stack is closed."""
    for module in root.modules():
        if any(param is not None for param in module._parameters.values()):
            stack.callback(module.register_forward_pre_hook(_arrive_before, prepend=True).remove)


def runs_compiled(root: nn.Module) -> bool:
    """True if torch compiles a module in it: what is compiled does not look for late parameters."""
    return any(
        isinstance(module, (torch._dynamo.OptimizedModule, torch.jit.ScriptModule))
        or module._compiled_call_impl is not None
        for module in root.modules()
    )


def _arrive_before(module: nn.Module, _: object) -> None:
    for param in module._parameters.values():
        if param is not None and is_late(param):
            arrive(param)


def _describes(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _READS
    return name in _DESCRIBES


@cache
def _late(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class of a parameter of this kind while it is late."""
    return type(f"Late{kind.__name__}", (LateParameter, kind), {})
