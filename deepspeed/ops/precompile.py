"""Kernels of Triton, compiled by threads before they are needed, while an engine is put together.

[Note: rehearsals] A launch tells what Triton compiles: dtypes, constants that follow from shapes, which numbers are
multiples of 16. So that there is no second list of this, the code that launches is run ahead with tensors that have no
memory (device "meta"); launches then only note what they would launch. Threads let Triton compile that, or load it from
its cache; most of the time they do not hold Python's lock. A launch that comes in the meantime waits for its kernel
instead of compiling it once more. A guess that was wrong has cost some time of other cores.

torch opens the GPU vendor's libraries of products and of attention at their first use, which takes two seconds on a
machine that has not read them since it was started. A thread uses each once with zeros, on the stream that new threads
have, the default one: there, torch keeps no working memory that the first step would not ask for as well.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed.log import logger, print_dist
from deepspeed.ops.capability import has_triton, on_cuda

Scene = Callable[[], Any]
"""Code that launches kernels, on tensors of the device "meta"."""

THREADS = ThreadPoolExecutor(16, thread_name_prefix="deepspeed-compile")  # a first start has about as many kernels
_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class KernelCall:
    """What a launch would have launched."""

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for calls of which Triton would make the same, as far as can be told."""
        return id(self.kernel), *map(_kind, self.args), *sorted(self.options.items(), key=lambda item: item[0])


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype
    return (value == 1, value % 16 == 0, value.bit_length() > 31) if isinstance(value, int) else type(value)


class _Noted(threading.local):
    calls: list[KernelCall] | None = None
    """What this thread notes instead of launching it; None: it launches."""


class _Pending:
    """What is being compiled, for the launches that need it."""

    def __init__(self) -> None:
        self.open: set[Future[Any]] = set()
        self._all: set[Future[Any]] = set()
        self._calls: dict[int, dict[tuple[Any, ...], set[Future[Any]]]] = {}
        """By kernel and by key of the call; a key stays when nothing of it is under way any more."""

    def put(self, future: Future[Any], call: KernelCall | None = None) -> None:
        """Let launches wait for `future`: those that are like `call`, without one all."""
        mine = self._all if call is None else self._calls.setdefault(id(call.kernel), {}).setdefault(call.key, set())
        for futures in (self.open, mine):
            futures.add(future)
            future.add_done_callback(futures.discard)

    def wait_for(self, call: KernelCall) -> None:
        """Return when nothing that a launch like `call` needs is under way.

        For a call that was not foreseen that is all of its kernel: Triton may find it to be the same as one of them.
        """
        wait(self._all.copy())
        known = self._calls.get(id(call.kernel), {})
        wait(known[call.key].copy() if call.key in known else set().union(*known.copy().values()))


_NOTED = _Noted()
PENDING = _Pending()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a kernel of Triton; in a rehearsal it is noted only."""
    if _NOTED.calls is not None:
        _NOTED.calls.append(KernelCall(kernel, args, options))
        return
    if PENDING.open:
        PENDING.wait_for(KernelCall(kernel, args, options))
    kernel[grid](*args, **options)


def is_placeholder(device: torch.device) -> bool:
    """True if tensors of such a device stand for a GPU's in this thread."""
    return device.type == "meta" and _NOTED.calls is not None


@contextmanager
def rehearsal() -> Iterator[list[KernelCall]]:
    """While it is entered, kernels of this thread do not run: what would be launched is noted in the list."""
    before, _NOTED.calls = _NOTED.calls, []
    try:
        yield _NOTED.calls
    finally:
        _NOTED.calls = before


def rehearses() -> bool:
    """True in a rehearsal: what computes outside of torch's operations leaves memory as it is."""
    return _NOTED.calls is not None


def kernel_calls_of(scene: Scene) -> list[KernelCall]:
    """What a scene would launch."""
    with rehearsal() as calls:
        scene()
    return calls


def forward_and_backward(compute: Callable[..., Any], *shapes: Sequence[int], dtype: torch.dtype) -> None:
    """A scene: compute with tensors of these shapes, and their gradients."""
    inputs = [torch.empty(*shape, dtype=dtype, device="meta", requires_grad=True) for shape in shapes]
    outs = compute(*inputs)
    outs = outs if isinstance(outs, tuple) else (outs,)
    torch.autograd.grad(outs, inputs, [torch.empty_like(out) for out in outs])


def _identity(value: Any) -> Any:
    """What is equal for partial functions of equal arguments, and has a hash."""
    if isinstance(value, partial):
        return (
            value.func,
            *map(_identity, value.args),
            *((key, _identity(value.keywords[key])) for key in value.keywords),
        )
    return value if isinstance(value, Hashable) else id(value)


class KernelPrecompiler:
    """What compiles ahead for one engine; a failure in it is logged, and happens again where the kernel is needed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: set[tuple[Any, ...]] = set()
        self._closed = False

    @classmethod
    def on(cls, device: torch.device) -> KernelPrecompiler | None:
        """For a device; None where Triton compiles nothing."""
        return cls(device) if device.type == "cuda" and compiles() else None

    def add(self, scenes: Iterable[Scene]) -> None:
        """Compile what these launch; returns at once."""
        load_triton()
        PENDING.put(THREADS.submit(self._collect, list(scenes)))

    def close(self) -> None:
        """Begin nothing more; what is being compiled is left to its thread."""
        self._closed = True

    def _collect(self, scenes: Sequence[Scene]) -> None:
        """Note what scenes launch, and begin to compile it."""
        kernels: dict[int, list[KernelCall]] = {}
        for call in self._noted(scenes):
            kernels.setdefault(id(call.kernel), []).append(call)
        wait([load_triton()])
        for calls in kernels.values():
            self._submit(*calls)

    def _noted(self, scenes: Sequence[Scene]) -> list[KernelCall]:
        """What scenes launch that is new: the first launches of all, which are those of a forward, before others."""
        distinct = {_identity(scene): scene for scene in scenes}.values()  # layers of a model have equal scenes
        calls = [each for scene in distinct for each in enumerate(self._tried(kernel_calls_of, scene) or ())]
        found: dict[tuple[Any, ...], KernelCall] = {}
        for _, call in sorted(calls, key=lambda each: each[0]):
            found.setdefault(call.key, call)
        new = [call for key, call in found.items() if key not in self._known]
        self._known.update(found)
        return new

    def _submit(self, call: KernelCall, *then: KernelCall) -> None:
        PENDING.put(THREADS.submit(self._compile, call, *then), call)

    def _compile(self, call: KernelCall, *then: KernelCall) -> None:
        """Compile a kernel's first call before its others: what Triton keeps for the kernel is made once."""
        if self._closed:
            return
        self._tried(self._compiled, call)
        for other in then:
            self._submit(other)

    def _compiled(self, call: KernelCall) -> None:
        """Let Triton compile what a call launches, or load it from its cache."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        made = call.kernel.warmup(*call.args, grid=(1,), **call.options)
        if self._device.type == "cuda" and made is not None:
            made.run  # noqa: B018 - the code that launches it and its place on the device are made when they are asked for

    def _tried(self, act: Callable[..., Any], *args: Any) -> Any:
        """Nothing of this is needed: what fails is logged, and fails again, visibly, where it is used."""
        try:
            return act(*args)
        except Exception as error:  # noqa: BLE001
            logger.warning(
                "a kernel could not be compiled ahead and is left to its first use: %s: %s", type(error).__name__, error
            )
            return None


def compiles() -> bool:
    """True where kernels of Triton are compiled: for a GPU that it knows, and not interpreted."""
    return bool(has_triton) and bool(on_cuda) and os.environ.get("TRITON_INTERPRET") != "1"


@cache
def load_triton() -> Future[None]:
    """Begin to load Triton's compiler, once for the process; returns at once."""
    return THREADS.submit(_load)


def _load() -> None:
    """Let it hash itself (hundreds of megabytes), and let a C compiler build what talks to the driver."""
    runtime = importlib.import_module("triton.runtime")
    homes = map(importlib.import_module, ("triton.runtime.cache", "triton.compiler.compiler"))  # by version
    hashed = next(home.triton_key for home in homes if hasattr(home, "triton_key"))
    parts = [THREADS.submit(hashed), THREADS.submit(lambda: runtime.driver.active)]  # which asks for no device
    importlib.import_module("triton.compiler.code_generator")  # which Triton imports when it compiles its first kernel
    wait(parts)


class Compilations:
    """A listener of Triton's compiler that logs how long a first start compiles; hands all on to the one before."""

    def __init__(self, before: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._before, self._clock = before, clock
        self.count = 0
        self.seconds = 0.0
        """In which something was compiled; threads do so concurrently."""
        self._until, self._told = float("-inf"), 0.0
        self._lock = threading.Lock()

    def __call__(self, *, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        """A kernel is there; logged on rank 0 if it is one of this library's that had to be compiled."""
        if self._before is not None:
            self._before(src=src, metadata=metadata, metadata_group=metadata_group, times=times, cache_hit=cache_hit)
        home = str(getattr(getattr(src, "fn", None), "__module__", ""))
        if cache_hit or not home.startswith("deepspeed."):
            return
        with self._lock:
            self.count += 1
            now = self._clock()
            self.seconds += max(0.0, now - max(now - times.total / 1e6, self._until))
            self._until = now
            told = self.seconds - self._told >= 1.0  # a line for each second
            self._told = self.seconds if told else self._told
        if told:
            print_dist(
                f"Triton has compiled {self.count} kernels in {self.seconds:.1f} s, the latest {src.name} of {home}; "
                "later starts find them in its cache",
                ranks=[0],
            )


def follow_compilation() -> None:
    """Log what Triton compiles from now on; called where a kernel of its is loaded, by any thread."""
    from triton import knobs

    with _LOCK:
        if not isinstance(knobs.compilation.listener, Compilations):
            knobs.compilation.listener = Compilations(knobs.compilation.listener)


Use = Callable[[torch.device], object]  # uses a library once

_ROWS = 256
_MOST = 2048
"""Of sides of a matrix: which kernel is taken matters little, and memory may be scarce."""


@contextmanager
def load_ahead(model: nn.Module, source: Any) -> Iterator[None]:
    """Load what the model needs while the body runs, if the config asks for kernels; then no thread uses the device."""
    config = _as_given(source)
    loading = []
    if _enabled(config, "fused_kernels", "fp8") and compiles():
        load_triton()
        if (device := _device()) is not None:
            loading.append(THREADS.submit(load_libraries, device, _seen(model, config)))
    try:
        yield
    finally:
        wait(loading)


def _as_given(source: Any) -> Mapping[str, Any]:
    """A config before it is validated; empty where that is not sure to be readable twice."""
    if isinstance(source, (str, os.PathLike)) and os.path.isfile(source):
        from deepspeed.config.read import read  # here: a dict need not wait until the config's schema is imported

        return read(source)[0]
    return source if isinstance(source, Mapping) else {}


def _enabled(config: Mapping[str, Any], *names: str) -> bool:
    sections = [config.get(name) for name in names]
    return any(isinstance(section, Mapping) and section.get("enabled") is True for section in sections)


def _device() -> torch.device | None:
    """The GPU that this rank is going to use; None where that is not sure before the ranks have met."""
    count, local_rank = torch.cuda.device_count(), os.environ.get("LOCAL_RANK", "")
    index = int(local_rank) if local_rank.isdecimal() else 0
    sure = local_rank.isdecimal() or count == 1
    return torch.device("cuda", index) if sure and index < count else None


def _seen(model: nn.Module, config: Mapping[str, Any]) -> list[Use]:
    """What the model uses first, in the order of a forward that would wait for it: attention, a linear layer."""
    half = torch.float16 if _enabled(config, "fp16") else torch.float32
    dtype = torch.bfloat16 if _enabled(config, "bf16", "bfloat16") else half
    try:
        linear = next((each for each in model.modules() if isinstance(each, nn.Linear)), None)
        heads = next(filter(None, map(_heads, model.modules())), None)
    except Exception:  # noqa: BLE001 - properties of a user's modules may raise anything
        return []
    uses: list[Use] = [] if heads is None else [partial(attention, *heads, dtype)]
    if linear is not None:
        kinds = [product, product8] if _enabled(config, "fp8") else [product]
        uses += [partial(kind, linear.in_features, linear.out_features, dtype) for kind in kinds]
    return uses


def _heads(module: nn.Module) -> tuple[int, int] | None:
    """(number, width) of the heads of a module that lets torch attend: torch's own, and models of Transformers."""
    if isinstance(module, nn.MultiheadAttention):
        return module.num_heads, module.head_dim
    config = getattr(module, "config", None)
    if getattr(config, "_attn_implementation", None) != "sdpa":
        return None
    count, size = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if not isinstance(count, int) or not isinstance(size, int) or count < 1:
        return None
    width = getattr(config, "head_dim", None)
    return count, width if isinstance(width, int) else size // count


def load_libraries(device: torch.device, uses: Sequence[Use]) -> None:
    """Use each in order; what fails is left to its first use."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    for use in uses:
        try:
            use(device)
        except Exception as error:  # noqa: BLE001 - a guess that nothing depends on
            logger.debug("a library could not be loaded ahead: %s: %s", type(error).__name__, error)


def product(inner: int, outer: int, dtype: torch.dtype, device: torch.device) -> object:
    """A linear layer, forth and back."""
    x, weight = (_zeros(rows, inner, dtype=dtype, device=device) for rows in (_ROWS, outer))
    out = functional.linear(x, weight)
    return torch.autograd.grad(out, (x, weight), out.detach())


def product8(inner: int, outer: int, dtype: torch.dtype, device: torch.device) -> object:
    """Scaled products of 8-bit numbers: those of a forward, and of a backward."""
    x, weight = (torch.zeros(rows, min(inner, _MOST), device=device) for rows in (_ROWS, min(outer, _MOST)))
    one, weight = torch.ones((), device=device), weight.to(torch.float8_e4m3fn).t()
    by = partial(torch._scaled_mm, mat2=weight, scale_a=one, scale_b=one, out_dtype=dtype)
    values, gradients = x.to(torch.float8_e4m3fn), x.to(torch.float8_e5m2)
    return [by(values, use_fast_accum=True), by(gradients, use_fast_accum=False)]


def attention(heads: int, width: int, dtype: torch.dtype, device: torch.device) -> object:
    """Causal attention, forth and back, by the kernel that torch chooses."""
    x = _zeros(1, heads, _ROWS, width, dtype=dtype, device=device)
    out = functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    return torch.autograd.grad(out, x, out.detach())


def _zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros([min(side, _MOST) for side in shape], dtype=dtype, device=device, requires_grad=True)
