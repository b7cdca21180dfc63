"""Tensors made on the device, and page-locked tensors on the host, with torch's own allocators."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from deepspeed.accelerator.interface import DeepSpeedAccelerator, UnknownNameError

__all__ = ["TensorMethods"]


class TensorMethods(DeepSpeedAccelerator):
    """The part of the contract that makes tensors; needs only the device's name."""

    def _maker(self, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
        return functools.partial(torch.tensor, dtype=dtype, device=self._name)

    @property
    def BFloat16Tensor(self) -> Callable[..., torch.Tensor]:
        return self._maker(torch.bfloat16)

    @property
    def ByteTensor(self) -> Callable[..., torch.Tensor]:
        return self._maker(torch.uint8)

    @property
    def DoubleTensor(self) -> Callable[..., torch.Tensor]:
        return self._maker(torch.float64)

    @property
    def FloatTensor(self) -> Callable[..., torch.Tensor]:
        return self._maker(torch.float32)

    @property
    def HalfTensor(self) -> Callable[..., torch.Tensor]:
        return self._maker(torch.float16)

    @property
    def IntTensor(self) -> Callable[..., torch.Tensor]:
        return self._maker(torch.int32)

    @property
    def LongTensor(self) -> Callable[..., torch.Tensor]:
        return self._maker(torch.int64)

    # ---- page-locked host memory

    def _check_pinning(self) -> None:
        chosen = os.environ.get("DS_PIN_MEMORY_BACKEND", "torch")
        if chosen != "torch":
            known = "is not part of this version" if chosen == "native" else "is unknown"
            raise UnknownNameError(
                f"DS_PIN_MEMORY_BACKEND={chosen!r} {known}; unset it, or set it to 'torch', torch's own allocator"
            )

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        self._check_pinning()
        wanted = tensor if match_shape else tensor.reshape(-1)  # before pinning: it may have to copy
        return wanted.pin_memory() if make_copy else self.pin_empty_like(wanted)

    def pin_empty(self, *size: Any, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
        self._check_pinning()
        return torch.empty(*size, dtype=dtype, device=device, pin_memory=True)

    def pin_empty_like(
        self, tensor: torch.Tensor, device: str = "cpu", dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return self.pin_empty(tensor.shape, dtype=dtype or tensor.dtype, device=device)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name
