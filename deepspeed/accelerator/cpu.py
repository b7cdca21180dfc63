"""The CPU as an accelerator: work is done when the call returns, memory is the process's."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch

from deepspeed.accelerator.host import HostEvent, HostMemory, numa_nodes_with_cores
from deepspeed.accelerator.interface import DeepSpeedAccelerator, UnknownNameError
from deepspeed.log import logger, warn_once

__all__ = ["CPU_Accelerator"]


def _number(variable: str) -> int | None:
    """A count from the environment, 0 if unset, None if it is no number of processes."""
    text = os.environ.get(variable, "").strip() or "0"
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


class CPU_Accelerator(DeepSpeedAccelerator):
    """The host's cores; a "device" is one process's share of them."""

    name = "cpu"
    backend = "gloo"
    has_streams = False
    exported = ("CCL", "GLOO")

    def __init__(self) -> None:
        super().__init__()
        self._memory = HostMemory()
        if find_spec("oneccl_bindings_for_pytorch") is not None:
            try:
                importlib.import_module("oneccl_bindings_for_pytorch")  # registers the backend with torch
                self._communication_backend_name = "ccl"
            except (ImportError, OSError, RuntimeError) as error:
                logger.warning("oneccl_bindings_for_pytorch is installed but broken (%s): using gloo", error)

    @classmethod
    def why_unavailable(cls) -> str | None:
        return None

    def is_synchronized_device(self) -> bool:
        return True

    # ---- device

    def device_name(self, device_index: int | None = None) -> str:
        return self._name  # "cpu:1" would only be another spelling of the same device

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        return nullcontext()

    def set_device(self, device_index: int) -> None:
        """All indices are the same device."""

    def current_device(self) -> int:
        number = _number("LOCAL_RANK")
        if number is None:
            raise UnknownNameError(
                f"LOCAL_RANK={os.environ['LOCAL_RANK']!r} is not a number of a process; set it to 0, 1, … or unset it"
            )
        return number

    def device_count(self) -> int:
        count = _number("LOCAL_SIZE")
        if count is None:
            # Exported once and forgotten: it must not end a job that it has nothing to do with.
            warn_once(f"LOCAL_SIZE={os.environ['LOCAL_SIZE']!r} is not used: it is no number of processes. Unset it.")
        return count or numa_nodes_with_cores() or 1

    def is_available(self) -> bool:
        return True

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing is ever pending."""

    # ---- random numbers

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator

    # ---- events

    @property
    def Event(self) -> Any:
        return HostEvent

    # ---- memory: what the process has resident is both allocated and reserved

    def empty_cache(self) -> None:
        """torch keeps no cache on the CPU."""

    def memory_allocated(self, device_index: int | None = None) -> int:
        return self._memory.resident()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return self._memory.peak()

    def memory_reserved(self, device_index: int | None = None) -> int:
        return self._memory.resident()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return self._memory.peak()

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        self._memory.reset_peak()

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return self._four_stats()

    def total_memory(self, device_index: int | None = None) -> int:
        return self._memory.total()

    def available_memory(self, device_index: int | None = None) -> int:
        return self._memory.available()

    # ---- dtypes, misc, graphs

    def is_bf16_supported(self) -> bool:
        return True

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        callback()

    def is_current_stream_capturing(self) -> bool:
        return False

    # ---- host memory: it is the device's memory, so there is nothing to lock

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        return tensor if match_shape else tensor.reshape(-1)

    def pin_empty(self, *size: Any, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)
