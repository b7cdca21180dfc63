"""The accelerator contract on top of `torch.get_device_module(name)` and `torch.accelerator`.

A vendor's class states facts as class attributes and overrides what its device does differently.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar

import torch

from deepspeed.accelerator.interface import DeepSpeedAccelerator, UnknownNameError
from deepspeed.errors import AcceleratorError

# What torch.accelerator has under another name.
_IN_TORCH_ACCELERATOR = {
    "current_device": "current_device_index",
    "set_device": "set_device_index",
    "mem_get_info": "get_memory_info",
}


class GenericAccelerator(DeepSpeedAccelerator):
    """Any device that torch knows by name."""

    name: ClassVar[str]
    backend: ClassVar[str]
    package: ClassVar[str | None] = None  # the import that adds torch.<name>; None if torch itself has it
    one_device: ClassVar[bool] = False  # one device per process: torch.<name>'s functions take no index
    has_streams: ClassVar[bool] = True
    graph_class: ClassVar[str | None] = None
    compile_backend: ClassVar[str] = "inductor"
    exported: ClassVar[tuple[str, ...]] = ()
    visible: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self._name = self.name
        self._communication_backend_name = self.backend
        self._compile_backend = self.compile_backend

    @classmethod
    def why_unavailable(cls) -> str | None:
        """None if a device of this kind can be used here, else the reason; creates no device context."""
        if cls.package is not None:
            if find_spec(cls.package.partition(".")[0]) is None:
                return f"package {cls.package.partition('.')[0]} is not installed"
            try:
                importlib.import_module(cls.package)
            except (ImportError, OSError, RuntimeError) as error:
                return f"importing {cls.package} failed: {error}"
        try:
            module = torch.get_device_module(cls.name)
        except RuntimeError:
            return f"torch {torch.__version__} has no module torch.{cls.name}"
        return None if module.is_available() else f"torch.{cls.name} finds no usable device"

    @functools.cached_property
    def _module(self) -> ModuleType:
        try:
            if self.package is not None:
                importlib.import_module(self.package)
            module: ModuleType = torch.get_device_module(self._name)
        except (ImportError, RuntimeError) as error:
            wanted = f"install {self.package}" if self.package else "install a torch build that has it"
            raise AcceleratorError(f"torch has no device module '{self._name}' ({error}); {wanted}") from error
        return module

    def _find(self, name: str) -> Any:
        """torch.<device>'s attribute, else torch.accelerator's, else None: vendors cover different parts."""
        own = getattr(self._module, name, None)
        if own is not None:
            return own
        current = torch.accelerator.current_accelerator()
        if current is None or current.type != self._name:
            return None
        return getattr(torch.accelerator, _IN_TORCH_ACCELERATOR.get(name, name), None)

    def _need(self, name: str) -> Any:
        found = self._find(name)
        if found is None:
            raise AcceleratorError(
                f"neither torch.{self._name} nor torch.accelerator of torch {torch.__version__} has '{name}'; "
                f"update torch{' and ' + self.package if self.package else ''}"
            )
        return found

    def _call(self, name: str, device_index: int | None = None, *arguments: Any) -> Any:
        index = () if device_index is None or self.one_device else (device_index,)
        return self._need(name)(*arguments, *index)

    # ---- nature of the device

    def is_synchronized_device(self) -> bool:
        return False

    # ---- device

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._need("device")(device_index)
        return context

    def set_device(self, device_index: int) -> None:
        self._need("set_device")(device_index)

    def current_device(self) -> int:
        return int(self._call("current_device"))

    def device_count(self) -> int:
        return int(self._call("device_count"))

    def synchronize(self, device_index: int | None = None) -> None:
        self._call("synchronize", device_index)

    # ---- random numbers

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        self._call("set_rng_state", device_index, new_state)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        state: torch.Tensor = self._call("get_rng_state", device_index)
        return state

    def manual_seed(self, seed: int) -> None:
        self._need("manual_seed")(seed)

    def manual_seed_all(self, seed: int) -> None:
        self._need("manual_seed_all")(seed)

    def initial_seed(self) -> int:
        return int(self._call("initial_seed"))

    def default_generator(self, device_index: int) -> torch.Generator:
        self._call("init")  # the generators exist only after it
        generator: torch.Generator = self._need("default_generators")[device_index]
        return generator

    # ---- streams and events

    @property
    def Stream(self) -> Any:
        return self._need("Stream") if self.has_streams else None

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        if stream is None or not self.has_streams:
            return nullcontext()
        context: AbstractContextManager[Any] = self._need("stream")(stream)
        return context

    def current_stream(self, device_index: int | None = None) -> Any:
        return self._call("current_stream", device_index) if self.has_streams else None

    def default_stream(self, device_index: int | None = None) -> Any:
        return self._call("default_stream", device_index) if self.has_streams else None

    @property
    def Event(self) -> Any:
        return self._need("Event")

    # ---- memory

    def empty_cache(self) -> None:
        self._call("empty_cache")

    def memory_allocated(self, device_index: int | None = None) -> int:
        return int(self._call("memory_allocated", device_index))

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return int(self._call("max_memory_allocated", device_index))

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return dict(self._call("memory_stats", device_index))

    def _four_stats(self) -> dict[str, Any]:
        """The counters of a device whose allocator keeps none, under torch's names."""
        return {
            "allocated_bytes.all.current": self.memory_allocated(),
            "allocated_bytes.all.peak": self.max_memory_allocated(),
            "reserved_bytes.all.current": self.memory_reserved(),
            "reserved_bytes.all.peak": self.max_memory_reserved(),
        }

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        self._call("reset_peak_memory_stats", device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        return int(self._call("memory_reserved", device_index))

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return int(self._call("max_memory_reserved", device_index))

    def total_memory(self, device_index: int | None = None) -> int:
        index = self.current_device() if device_index is None else device_index
        return int(self._need("get_device_properties")(index).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        free, _ = self._call("mem_get_info", device_index)
        return int(free) + self.memory_reserved(device_index) - self.memory_allocated(device_index)

    # ---- dtypes

    def is_bf16_supported(self) -> bool:
        return bool(self._call("is_bf16_supported"))

    def is_fp16_supported(self) -> bool:
        return True

    # ---- misc

    def is_available(self) -> bool:
        return bool(self._call("is_available"))

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        queue = self._find("_lazy_call")
        if queue is None:
            callback()
        else:
            queue(callback)

    # ---- graphs

    def is_current_stream_capturing(self) -> bool:
        asked = self._find("is_current_stream_capturing")
        return asked is not None and bool(asked())

    def create_graph(self) -> Any:
        graph = self._find(self.graph_class) if self.graph_class else None
        return None if graph is None else graph()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        if graph is None:
            return nullcontext()
        context: AbstractContextManager[Any] = self._need("graph")(graph, pool=pool, stream=stream)
        return context

    # ---- ops

    # ---- environment

    def export_envs(self) -> list[str]:
        return list(self.exported)

    def visible_devices_envs(self) -> list[str]:
        return list(self.visible)

    # ---- compile

    def get_compile_backend(self) -> str:
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        from torch._dynamo import list_backends  # seconds to import, and only needed here

        known = sorted({*list_backends(exclude_tags=()), self.compile_backend})
        if backend not in known:
            raise UnknownNameError(
                f"torch.compile backend {backend!r} is unknown to torch {torch.__version__}; use one of "
                f"{', '.join(known)}, or register it with torch._dynamo.register_backend first"
            )
        self._compile_backend = backend
