"""`Counter`: operations as torch dispatches them, each added to the module that is running."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from deepspeed.events import AHEAD
from deepspeed.profiling.flops_profiler.costs import Work, work_of
from deepspeed.profiling.modes import leave

__all__ = ["Counter", "Work", "wrapFunc"]

_ENTER, _EXIT = torch.ops.profiler._record_function_enter_new, torch.ops.profiler._record_function_exit
_PARTS = torch._C.DispatchKey.CompositeImplicitAutograd


class Counter(TorchDispatchMode):
    """While it is entered, hands the work of every operation to `add`."""

    def __init__(self, add: Callable[[Work], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.add = add
        self._ranges: list[str] = []
        self._fast = True

    def begin(self) -> None:
        """Enter, with encoder layers in parts: in one piece each would be a single operation that nobody counts."""
        self._fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Leave; the last one that counts puts torch's switch back as the first one found it."""
        counters = _counters()
        if counters == [self]:
            torch.backends.mha.set_fastpath_enabled(self._fast)
        elif counters and counters[0] is self:
            counters[1]._fast = self._fast
        leave(self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.is_inference_mode_enabled() and _is_made_of_others(func):
            with self:  # which sees the parts of the layer that torch hands over as a whole in this mode
                return func._op_dk(_PARTS, *args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket is _ENTER:
            self._ranges.append(args[0])
        elif func._overloadpacket is _EXIT and self._ranges:
            self._ranges.pop()
        if AHEAD in self._ranges:  # work of the backward, which whoever asks for that of the forward does not mean
            return out
        work = work_of(func._overloadpacket, args, kwargs or {}, out)
        if work[0]:
            self.add(work)
        return out


def _counters() -> list[Counter]:
    """Those that are entered, the outermost first."""
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Counter)]


@functools.cache
def _is_made_of_others(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _PARTS)


def wrapFunc(func: Callable[..., Any], funcFlopCompute: Callable[..., Work]) -> Callable[..., Any]:
    """`func`, which tells a profile that is running what it costs: funcFlopCompute(*args, **kwargs) → (flops, MACs).

    For kernels of one's own, whose operations torch does not see.
    """

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        counters = _counters()
        if not counters:
            return func(*args, **kwargs)
        counters[-1].add(funcFlopCompute(*args, **kwargs))
        return func(*args, **kwargs)

    return call
