"""Dispatch modes that watch from one call to another, where a `with` block would not do."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

__all__ = ["leave"]


def leave(mode: TorchDispatchMode) -> None:
    """Leave a mode that was entered by this thread, also one that others were entered in; those go on."""
    stack = _get_current_dispatch_mode_stack()
    if mode not in stack:
        return
    inner = stack[stack.index(mode) + 1 :]
    # torch takes the innermost mode off, whichever is told to exit; what else a mode does at its end is not meant
    for other in reversed(inner):
        TorchDispatchMode.__exit__(other, None, None, None)
    TorchDispatchMode.__exit__(mode, None, None, None)
    for other in inner:
        TorchDispatchMode.__enter__(other)
