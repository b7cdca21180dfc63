"""Kernels that are compiled before they are needed, several at a time, while an engine is put together.

[Note: rehearsals] A launch tells what Triton compiles: dtypes, constants that follow from shapes, which numbers are
multiples of 16. So that there is no second list of this, the code that launches is run ahead with tensors that have no
memory (device "meta"); launches then only note what they would launch. What Triton's cache has of it is loaded, the
rest is compiled by threads, which take turns at Python's lock with the main thread, or by processes beside this one
where they are asked for and there are cores for them. A launch that comes in the meantime waits for its kernel instead
of compiling it once more. A guess that was wrong has cost somebody else some time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepspeed.log import logger
from deepspeed.ops.capability import has_triton, on_cuda
from deepspeed.ops.compilation import tell_compiled
from deepspeed.ops.compile_away import cached_only, compile_away, workers
from deepspeed.ops.triton_loading import load_triton
from deepspeed.ops.vendor_loading import wait_for_vendor

__all__ = ["Call", "Rehearsal", "Scene", "calls_of", "compiles", "forth_and_back", "launch", "on_stage"]

Scene = Callable[[], Any]
"""Code that launches kernels, on tensors of the device "meta"."""

_THREADS = 8


@dataclass(frozen=True, slots=True)
class Call:
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


class _Stage(threading.local):
    """What this thread notes instead of launching it; None: nothing."""

    noted: list[Call] | None = None


class _Board:
    """What is being compiled, for those who launch."""

    def __init__(self) -> None:
        self.quiet = threading.Lock()
        """Held by a thread that is in Triton's compiler, while processes are forked; see [Note: forked workers]."""
        self.open: set[Future[Any]] = set()
        self._all: set[Future[Any]] = set()
        self._calls: dict[int, dict[tuple[Any, ...], set[Future[Any]]]] = {}
        """By kernel and by key of the call; a key stays when nothing of it is under way any more."""

    def put(self, future: Future[Any], call: Call | None = None) -> None:
        """Let launches wait for `future`: those that are like `call`, without one all."""
        mine = self._all if call is None else self._calls.setdefault(id(call.kernel), {}).setdefault(call.key, set())
        for futures in (self.open, mine):
            futures.add(future)
            future.add_done_callback(futures.discard)

    def wait_for(self, call: Call) -> None:
        """Return when nothing that a launch like `call` needs is under way.

        For what nobody foresaw that is all of its kernel: Triton may find it to be the same as one of them.
        """
        wait(self._all.copy())
        known = self._calls.get(id(call.kernel), {})
        wait(known[call.key].copy() if call.key in known else set().union(*known.copy().values()))


_STAGE = _Stage()
_BOARD = _Board()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a kernel of Triton; in a rehearsal it is noted only."""
    if _STAGE.noted is not None:
        _STAGE.noted.append(Call(kernel, args, options))
        return
    if _BOARD.open:
        _BOARD.wait_for(Call(kernel, args, options))
    kernel[grid](*args, **options)


def on_stage(device: torch.device) -> bool:
    """True if tensors of such a device stand for a GPU's in this thread."""
    return device.type == "meta" and _STAGE.noted is not None


def calls_of(scene: Scene) -> list[Call]:
    """What a scene would launch."""
    before, _STAGE.noted = _STAGE.noted, []
    try:
        scene()
        return _STAGE.noted
    finally:
        _STAGE.noted = before


def forth_and_back(compute: Callable[..., Any], *shapes: Sequence[int], dtype: torch.dtype) -> None:
    """A scene: compute with tensors of these shapes, and their gradients."""
    inputs = [torch.empty(*shape, dtype=dtype, device="meta", requires_grad=True) for shape in shapes]
    outs = compute(*inputs)
    outs = outs if isinstance(outs, tuple) else (outs,)
    torch.autograd.grad(outs, inputs, [torch.empty_like(out) for out in outs])


def _distinct(scenes: Iterable[Scene]) -> list[Scene]:
    """One of those that are the same function of equal arguments: layers of a model have equal scenes, one each."""
    found: dict[Any, Scene] = {}
    for scene in scenes:
        key = _identity(scene)
        try:
            found.setdefault(key, scene)
        except TypeError:  # of arguments that cannot be compared
            found[id(scene)] = scene
    return list(found.values())


def _identity(value: Any) -> Any:
    """What is equal for partial functions of equal arguments."""
    if not isinstance(value, partial):
        return value
    keywords = ((name, _identity(value.keywords[name])) for name in sorted(value.keywords))
    return partial, value.func, *map(_identity, value.args), *keywords


class Rehearsal:
    """What compiles ahead for one engine; whatever fails in it is told, and then happens where it is needed."""

    def __init__(self, device: torch.device, processes: int = 0) -> None:
        """At most so many `processes` beside this one compile; without any, threads do."""
        self._device = device
        self._most = processes
        self._pool: ThreadPoolExecutor | None = None
        self._known: set[tuple[Any, ...]] = set()
        self._loaded: Future[None] | None = None
        self._stopped = threading.Event()

    @classmethod
    def on(cls, device: torch.device, processes: int = 0) -> Rehearsal | None:
        """For a device; None where Triton compiles nothing."""
        return cls(device, processes) if device.type == "cuda" and compiles() else None

    def begin(self) -> None:
        """Let threads load Triton's compiler."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="deepspeed-compile")
            self._loaded = load_triton()

    def add(self, scenes: Iterable[Scene]) -> None:
        """Compile what these launch; returns at once."""
        self.begin()
        assert self._pool is not None, "begun"
        _BOARD.put(self._pool.submit(self._collect, list(scenes)))

    def close(self) -> None:
        """Begin nothing more; what is being compiled is left to its thread, and processes are ended."""
        self._stopped.set()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _collect(self, scenes: Sequence[Scene]) -> None:
        """Note what scenes launch, and begin to compile it."""
        calls = self._noted(scenes)
        if self._loaded is not None:
            wait([self._loaded])
        count = self._tried(workers, self._most) if calls and self._most else 0
        if count:
            self._submit_away(calls, count)
            return
        kernels: dict[int, list[Call]] = {}
        for call in calls:
            kernels.setdefault(id(call.kernel), []).append(call)
        for first, *rest in kernels.values():  # a kernel's first call before its others
            self._submit(first, rest)

    def _noted(self, scenes: Sequence[Scene]) -> list[Call]:
        """What scenes launch that is new: the first launches of all, which are those of a forward, before others."""
        found: list[tuple[int, Call]] = []
        for scene in _distinct(scenes):
            for place, call in enumerate(self._tried(calls_of, scene) or ()):
                if call.key not in self._known:
                    self._known.add(call.key)
                    found.append((place, call))
        return [call for _, call in sorted(found, key=lambda each: each[0])]

    def _submit(self, call: Call, then: Sequence[Call] = (), alone: AbstractContextManager[Any] | None = None) -> None:
        assert self._pool is not None, "begun"
        try:
            _BOARD.put(self._pool.submit(self._compile, call, then, alone), call)
        except RuntimeError:  # closed in the meantime
            return

    def _compile(self, call: Call, then: Sequence[Call], alone: AbstractContextManager[Any] | None) -> None:
        with alone or nullcontext():
            self._tried(self._compiled, call)
        for other in then:
            self._submit(other)

    def _compiled(self, call: Call) -> None:
        self._enter()
        made = _warmed(call)
        if made is not None and self._device.type == "cuda":
            made.run  # noqa: B018 - the code that launches it and its place on the device are made when they are asked for

    def _enter(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _submit_away(self, calls: Sequence[Call], count: int) -> None:
        """Let processes compile; launches wait until this one has loaded what they made."""
        assert self._pool is not None, "begun"
        ended: list[Future[None]] = [Future() for _ in calls]
        for call, future in zip(calls, ended, strict=True):
            _BOARD.put(future, call)

        def release(_task: Any = None) -> None:
            for future in ended:
                if not future.done():
                    future.set_result(None)

        try:
            self._pool.submit(self._away, calls, count, ended).add_done_callback(release)
        except RuntimeError:  # closed in the meantime
            release()

    def _away(self, calls: Sequence[Call], count: int, ended: Sequence[Future[None]]) -> None:
        """Load what is there, let processes compile the rest, and threads what these did not."""
        self._enter()
        with _BOARD.quiet:
            missing = [at for at, call in enumerate(calls) if not self._found(call)]
        for at in {*range(len(calls))}.difference(missing):
            ended[at].set_result(None)

        def heard(which: int, took: float) -> None:
            at = missing[which]
            if took > 0:
                self._tried(tell_compiled, calls[at].kernel, took)
            with _BOARD.quiet:
                self._tried(self._compiled, calls[at])
            ended[at].set_result(None)

        if missing:
            kernels = [partial(_warmed, calls[at]) for at in missing]
            on_device = self._device.type == "cuda"
            wait_for_vendor()  # nothing is opened while processes are forked
            left = compile_away(kernels, count, heard, self._stopped, quiet=_BOARD.quiet, launchers=on_device)
            for which in left:
                self._submit(calls[missing[which]], alone=_BOARD.quiet)

    def _found(self, call: Call) -> bool:
        """Load a kernel that Triton's cache has; False if it has not, and for what fails, which is tried again."""
        try:
            with cached_only():
                self._compiled(call)
        except Exception:  # noqa: BLE001
            return False
        return True

    def _tried(self, act: Callable[..., Any], *args: Any) -> Any:
        """Nothing of this is needed: what fails is told, and fails again, in front of everybody, where it is used."""
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


def _warmed(call: Call) -> Any:
    """Let Triton compile what a call launches, or find it in its cache."""
    return call.kernel.warmup(*call.args, grid=(1,), **call.options)
