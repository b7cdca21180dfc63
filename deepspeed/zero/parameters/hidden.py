"""Functions that torch.compile does not look into: they run between compiled parts.

[Note: not torch.compiler.disable] That would load the compiler, which takes seconds, in runs that compile nothing, and
adds a call. What it does is small: it marks the function, and its code as not to be compiled, with all it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["hidden"]

F = TypeVar("F", bound=Callable[..., Any])


def hidden(function: F) -> F:
    """The function, invisible to torch.compile."""
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function
