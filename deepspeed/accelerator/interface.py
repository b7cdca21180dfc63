"""The accelerator contract: every question that the library, or a user's script, may ask about the device.

`DeepSpeedAccelerator` answers by `torch.get_device_module(name)` and `torch.accelerator`. A class of a device states
facts as class attributes and overrides what its device does differently; third parties subclass it, too.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar

import torch

from deepspeed.errors import AcceleratorError

__all__ = ["DeepSpeedAccelerator", "UnknownNameError"]

# What torch.accelerator has under another name.
_IN_TORCH_ACCELERATOR = {
    "current_device": "current_device_index",
    "set_device": "set_device_index",
    "mem_get_info": "get_memory_info",
}


class UnknownNameError(AcceleratorError, ValueError):
    """A name or a setting that this library, torch or this machine does not have."""


def _tensors_of(dtype: torch.dtype) -> property:
    return property(lambda self: functools.partial(torch.tensor, dtype=dtype, device=self._name))


def _check_pinning() -> None:
    chosen = os.environ.get("DS_PIN_MEMORY_BACKEND", "torch")
    if chosen != "torch":
        known = "is not part of this version" if chosen == "native" else "is unknown"
        raise UnknownNameError(
            f"DS_PIN_MEMORY_BACKEND={chosen!r} {known}; unset it, or set it to 'torch', torch's own allocator"
        )


class DeepSpeedAccelerator:
    """One kind of device; an index always counts devices of this kind, None means the current one."""

    name: ClassVar[str] = ""
    backend: ClassVar[str] = ""
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

    # ---- nature of the device -------------------------------------------------------------------------------

    def is_synchronized_device(self) -> bool:
        """True if work is done when the call that asked for it returns: streams and events mean nothing."""
        return False

    def use_host_timers(self) -> bool:
        """True if the host's clock times device work correctly."""
        return self.is_synchronized_device()

    def resolves_data_dependency(self) -> bool:
        """True if the device orders work by its data, so that no stream has to be told to wait."""
        return self.is_synchronized_device()

    def handles_memory_backpressure(self) -> bool:
        """True if the device itself slows the host down when memory runs short."""
        return self.is_synchronized_device()

    # ---- device ---------------------------------------------------------------------------------------------

    def device_name(self, device_index: int | None = None) -> str:
        """`"cuda"`, or `"cuda:1"` when an index is given."""
        return self._name if device_index is None else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        """A context in which this device is the current one."""
        context: AbstractContextManager[Any] = self._need("device")(device_index)
        return context

    def set_device(self, device_index: int) -> None:
        """Make this device the current one of this process."""
        self._need("set_device")(device_index)

    def current_device(self) -> int:
        """Index of the current device."""
        return int(self._call("current_device"))

    def current_device_name(self) -> str:
        """Name of the current device, with its index where the kind has several."""
        return self.device_name(self.current_device())

    def device_count(self) -> int:
        """Number of devices that this process may use; asking must not create a device context."""
        return int(self._call("device_count"))

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait until all work queued on the device is done."""
        self._call("synchronize", device_index)

    # ---- random numbers -------------------------------------------------------------------------------------

    def random(self) -> ModuleType:
        """torch's module of random-number functions."""
        return torch.random

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Put the device's generator into a state that `get_rng_state` returned."""
        self._call("set_rng_state", device_index, new_state)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """State of the device's generator, a byte tensor on the host."""
        state: torch.Tensor = self._call("get_rng_state", device_index)
        return state

    def manual_seed(self, seed: int) -> None:
        """Seed the current device's generator."""
        self._need("manual_seed")(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices of this kind."""
        self._need("manual_seed_all")(seed)

    def initial_seed(self) -> int:
        """The seed last given to the current device's generator."""
        return int(self._call("initial_seed"))

    def default_generator(self, device_index: int) -> torch.Generator:
        """The generator that random functions use on this device."""
        self._call("init")  # the generators exist only after it
        generator: torch.Generator = self._need("default_generators")[device_index]
        return generator

    # ---- streams and events ---------------------------------------------------------------------------------

    @property
    def Stream(self) -> Any:
        """The stream class, or None where the device has no streams."""
        return self._need("Stream") if self.has_streams else None

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which work is queued on `stream`; None changes nothing."""
        if stream is None or not self.has_streams:
            return nullcontext()
        context: AbstractContextManager[Any] = self._need("stream")(stream)
        return context

    def current_stream(self, device_index: int | None = None) -> Any:
        """The stream that work is queued on now, or None where the device has no streams."""
        return self._call("current_stream", device_index) if self.has_streams else None

    def default_stream(self, device_index: int | None = None) -> Any:
        """The device's default stream, or None where the device has no streams."""
        return self._call("default_stream", device_index) if self.has_streams else None

    @property
    def Event(self) -> Any:
        """The event class: record, wait, query, synchronize, elapsed_time (milliseconds)."""
        return self._need("Event")

    # ---- memory, in bytes -----------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        """Give memory that the allocator keeps but does not use back to the system."""
        self._call("empty_cache")

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes that tensors hold now."""
        return int(self._call("memory_allocated", device_index))

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Most bytes that tensors held since the last reset."""
        return int(self._call("max_memory_allocated", device_index))

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        """Start the peak of `max_memory_allocated` anew, and with it all others."""
        self.reset_peak_memory_stats(device_index)

    def memory_cached(self, device_index: int | None = None) -> int:
        """Old name of `memory_reserved`."""
        return self.memory_reserved(device_index)

    def max_memory_cached(self, device_index: int | None = None) -> int:
        """Old name of `max_memory_reserved`."""
        return self.max_memory_reserved(device_index)

    def reset_max_memory_cached(self, device_index: int | None = None) -> None:
        """Start the peak of `max_memory_reserved` anew, and with it all others."""
        self.reset_peak_memory_stats(device_index)

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """The allocator's counters, named as `torch.cuda.memory_stats` names them."""
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
        """Start all peaks anew."""
        self._call("reset_peak_memory_stats", device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes that the allocator holds, used or not."""
        return int(self._call("memory_reserved", device_index))

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """Most bytes that the allocator held since the last reset."""
        return int(self._call("max_memory_reserved", device_index))

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes that the device has."""
        index = self.current_device() if device_index is None else device_index
        return int(self._need("get_device_properties")(index).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes that this process can still allocate: free on the device, or reserved and unused."""
        free, _ = self._call("mem_get_info", device_index)
        return int(free) + self.memory_reserved(device_index) - self.memory_allocated(device_index)

    # ---- dtypes ---------------------------------------------------------------------------------------------

    def is_bf16_supported(self) -> bool:
        """True if bfloat16 can be computed with."""
        return bool(self._call("is_bf16_supported"))

    def is_fp16_supported(self) -> bool:
        """True if float16 can be computed with."""
        return True

    def is_fp64_supported(self) -> bool:
        """True if float64 can be computed with."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Floating-point dtypes that can be computed with."""
        optional = (
            (torch.float16, self.is_fp16_supported()),
            (torch.bfloat16, self.is_bf16_supported()),
            (torch.float64, self.is_fp64_supported()),
        )
        return [torch.float32, *(dtype for dtype, supported in optional if supported)]

    # ---- misc -----------------------------------------------------------------------------------------------

    def is_available(self) -> bool:
        """True if at least one device can be used; asking must not create a device context."""
        return bool(self._call("is_available"))

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        """Open a named range for the device's profiler; nothing where none takes ranges through torch."""
        return

    def range_pop(self, domain: str | None = None) -> None:
        """Close the range opened last."""
        return

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        """Run `callback` once the device is initialised: now, or when that happens."""
        queue = self._find("_lazy_call")
        if queue is None:
            callback()
        else:
            queue(callback)

    def communication_backend_name(self) -> str:
        """Name of the torch.distributed backend for tensors on this device."""
        return self._communication_backend_name

    def is_triton_supported(self) -> bool:
        """True if Triton kernels run on this device and Triton is installed."""
        return False

    def prefer_triton_grouped_mm(self) -> bool:
        """True if a Triton grouped matrix product beats torch's own on this device."""
        return False

    # ---- graphs ---------------------------------------------------------------------------------------------

    def is_current_stream_capturing(self) -> bool:
        """True while work on the current stream is recorded into a graph."""
        asked = self._find("is_current_stream_capturing")
        return asked is not None and bool(asked())

    def create_graph(self) -> Any:
        """An empty graph, or None where the device has no graphs."""
        graph = self._find(self.graph_class) if self.graph_class else None
        return None if graph is None else graph()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        """A context in which work is recorded into `graph`; with graph None it simply runs."""
        if graph is None:
            return nullcontext()
        context: AbstractContextManager[Any] = self._need("graph")(graph, pool=pool, stream=stream)
        return context

    def replay_graph(self, graph: Any) -> None:
        """Run what was recorded; nothing for graph None."""
        if graph is not None:
            graph.replay()

    # ---- tensors: callables that make a tensor on the current device from data --------------------------------

    BFloat16Tensor = _tensors_of(torch.bfloat16)
    ByteTensor = _tensors_of(torch.uint8)
    DoubleTensor = _tensors_of(torch.float64)
    FloatTensor = _tensors_of(torch.float32)
    HalfTensor = _tensors_of(torch.float16)
    IntTensor = _tensors_of(torch.int32)
    LongTensor = _tensors_of(torch.int64)

    # ---- page-locked host memory ----------------------------------------------------------------------------

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        """Page-lock existing host memory for the device; False if the device has no need or no way."""
        return False

    def unregister_host_memory(self, address: int) -> bool:
        """Undo `register_host_memory`; False if that had returned False."""
        return False

    def pin_memory_alignment(self) -> int:
        """What `pin_empty` returns starts at a multiple of this many bytes."""
        return 64

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """A page-locked tensor like `tensor`: with its values, unless make_copy is False; flat, unless match_shape."""
        _check_pinning()
        wanted = tensor if match_shape else tensor.reshape(-1)  # before pinning: it may have to copy
        return wanted.pin_memory() if make_copy else self.pin_empty_like(wanted)

    def pin_empty(self, *size: Any, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
        """An uninitialised page-locked tensor."""
        _check_pinning()
        return torch.empty(*size, dtype=dtype, device=device, pin_memory=True)

    def pin_empty_like(
        self, tensor: torch.Tensor, device: str = "cpu", dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """An uninitialised page-locked tensor of the same shape."""
        return self.pin_empty(tensor.shape, dtype=dtype or tensor.dtype, device=device)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """True if the tensor lies in page-locked memory."""
        return tensor.is_pinned()

    def unpin_memory(self, tensor: torch.Tensor) -> None:
        """Say that `tensor` need not stay page-locked; torch's allocator takes its memory back with the tensor."""
        return

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """True if the tensor lies on a device of this kind."""
        return tensor.device.type == self._name

    # ---- ops ------------------------------------------------------------------------------------------------

    def op_builder_dir(self) -> str:
        """Dotted name of the module that holds the op builders."""
        return "deepspeed.ops.op_builder"

    def create_op_builder(self, class_name: str) -> Any:
        """An instance of the op builder with this class name, or None if there is none."""
        builder = self.get_op_builder(class_name)
        return None if builder is None else builder()

    def get_op_builder(self, class_name: str) -> Any:
        """The op builder class with this name, or None if there is none."""
        # By name, since ops is a higher layer; a module that fails to import for another reason is told.
        home = self.op_builder_dir()
        try:
            module = importlib.import_module(home)
        except ModuleNotFoundError as error:
            if error.name is not None and (home == error.name or home.startswith(error.name + ".")):
                return None
            raise
        return getattr(module, class_name, None)

    def build_extension(self) -> Any:
        """The setuptools command class that compiles extensions for this device."""
        from torch.utils.cpp_extension import BuildExtension  # needs setuptools, which torch does not require

        return BuildExtension

    # ---- environment of launched processes ------------------------------------------------------------------

    def export_envs(self) -> list[str]:
        """Prefixes of the environment variables that remote nodes must receive."""
        return list(self.exported)

    def visible_devices_envs(self) -> list[str]:
        """Environment variables that limit which devices a process sees."""
        return list(self.visible)

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Sequence[int | str]
    ) -> None:
        """Write the ids into `current_env` under every variable of `visible_devices_envs`."""
        for variable in self.visible_devices_envs():
            current_env[variable] = ",".join(map(str, local_accelerator_ids))

    # ---- compile --------------------------------------------------------------------------------------------

    def get_compile_backend(self) -> str:
        """The torch.compile backend used by default."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Change that backend; a name that torch does not know is an error."""
        from torch._dynamo import list_backends  # seconds to import, and only needed here

        known = sorted({*list_backends(exclude_tags=()), self.compile_backend})
        if backend not in known:
            raise UnknownNameError(
                f"torch.compile backend {backend!r} is unknown to torch {torch.__version__}; use one of "
                f"{', '.join(known)}, or register it with torch._dynamo.register_backend first"
            )
        self._compile_backend = backend
