"""`OnDevice`: a context in which models are built on one device and with one floating point dtype."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["OnDevice"]

_CONSTRUCTORS = frozenset(
    getattr(torch, name)
    for name in (
        *("empty", "zeros", "ones", "full", "arange", "linspace", "eye", "rand", "randn", "tensor", "as_tensor"),
        *("empty_strided", "logspace", "scalar_tensor", "asarray"),
    )
)


class OnDevice:
    """Builds on `device`, by default without memory, and makes floating point tensors `dtype`; not if not `enabled`.

        with OnDevice(dtype=torch.bfloat16, device="meta"):
            model = Transformer(config)

    A device that a constructor names itself wins. Integer and boolean tensors keep their dtype.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self.dtype = dtype
        self.device = device
        self.enabled = enabled
        self._entered: list[ExitStack] = []

    def __enter__(self) -> OnDevice:
        stack = ExitStack()
        if self.enabled:
            stack.enter_context(torch.device(self.device))
            if self.dtype.is_floating_point:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self.dtype)
                stack.enter_context(_Floating(self.dtype))
        self._entered.append(stack)
        return self

    def __exit__(self, *exc: object) -> None:
        self._entered.pop().close()


class _Floating(TorchFunctionMode):
    """Casts what constructors make, also where they name another floating point dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _CONSTRUCTORS and isinstance(made, Tensor) and made.is_floating_point():
            return made.to(self._dtype)
        return made
