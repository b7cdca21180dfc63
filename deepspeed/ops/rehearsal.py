"""Kernels that are compiled before they are needed, several at a time, while an engine is put together.

[Note: rehearsals] A launch tells what Triton compiles: dtypes, constants that follow from shapes, which numbers are
multiples of 16. So that there is no second list of this, the code that launches is run ahead with tensors that have no
memory (device "meta"); launches then only note what they would launch, and threads compile it. A launch that comes in
the meantime waits for its kernel instead of compiling it once more. A guess that was wrong has cost a thread some time.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.log import logger
from deepspeed.ops.capability import has_triton, on_cuda

__all__ = ["Call", "Rehearsal", "Scene", "calls_of", "forth_and_back", "launch", "on_stage"]

Scene = Callable[[], Any]
"""Code that launches kernels, on tensors of the device "meta"."""

_THREADS = 8
_KEYS = ("triton.runtime.cache", "triton.compiler.compiler")
"""Where Triton's hash of itself is, by version."""


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
        self.open: set[Future[Any]] = set()
        self._kernels: dict[int, list[Future[Any]]] = {}

    def put(self, future: Future[Any], kernel: Any = None) -> None:
        """Let launches wait for `future`: those of `kernel`, without one all."""
        self.open.add(future)
        self._kernels.setdefault(id(kernel), []).append(future)
        future.add_done_callback(self.open.discard)

    def wait_for(self, kernel: Any) -> None:
        """Return when nothing that a launch of `kernel` needs is under way."""
        for key in (id(None), id(kernel)):
            wait(self._kernels.get(key, ()))
            self._kernels.pop(key, None)


_STAGE = _Stage()
_BOARD = _Board()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a kernel of Triton; in a rehearsal it is noted only."""
    if _STAGE.noted is not None:
        _STAGE.noted.append(Call(kernel, args, options))
        return
    if _BOARD.open:
        _BOARD.wait_for(kernel)
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


class Rehearsal:
    """The threads that compile for one engine; whatever fails in them is told, and then happens where it is needed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: ThreadPoolExecutor | None = None
        self._known: set[tuple[Any, ...]] = set()
        self._loaded: Future[Any] | None = None

    @classmethod
    def on(cls, device: torch.device) -> Rehearsal | None:
        """For a device; None where Triton compiles nothing."""
        interprets = os.environ.get("TRITON_INTERPRET") == "1"
        return cls(device) if device.type == "cuda" and has_triton and on_cuda and not interprets else None

    def begin(self) -> None:
        """Let a thread load Triton's compiler."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="deepspeed-compile")
            self._loaded = self._pool.submit(self._load)

    def add(self, scenes: Iterable[Scene]) -> None:
        """Compile what these launch; returns at once."""
        self.begin()
        assert self._pool is not None, "begun"
        _BOARD.put(self._pool.submit(self._collect, list(scenes)))

    def close(self) -> None:
        """Begin nothing more; what is being compiled is left to its thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _load(self) -> None:
        """Triton hashes itself, hundreds of megabytes, and compiles its driver: at once, and before any kernel."""
        assert self._pool is not None, "begun"
        driver = self._pool.submit(self._open_driver)
        for name in _KEYS:
            found = getattr(importlib.import_module(name), "triton_key", None)
            if found is not None:
                found()
                break
        driver.result()

    def _open_driver(self) -> None:
        runtime = importlib.import_module("triton.runtime")
        self._enter()
        runtime.driver.active.get_current_target()

    def _enter(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _collect(self, scenes: Sequence[Scene]) -> None:
        """Note what scenes launch, and begin to compile it: a kernel's first call before its others."""
        calls: dict[int, list[Call]] = {}
        for scene in scenes:
            for call in self._tried(calls_of, scene) or ():
                if call.key not in self._known:
                    self._known.add(call.key)
                    calls.setdefault(id(call.kernel), []).append(call)
        if self._loaded is not None:
            wait([self._loaded])
        for first, *rest in calls.values():
            self._submit(first, rest)

    def _submit(self, call: Call, then: Sequence[Call] = ()) -> None:
        assert self._pool is not None, "begun"
        try:
            _BOARD.put(self._pool.submit(self._compile, call, then), call.kernel)
        except RuntimeError:  # closed in the meantime
            return

    def _compile(self, call: Call, then: Sequence[Call]) -> None:
        self._tried(self._compiled, call)
        for other in then:
            self._submit(other)

    def _compiled(self, call: Call) -> None:
        self._enter()
        made = call.kernel.warmup(*call.args, grid=(1,), **call.options)
        if made is not None and self._device.type == "cuda":
            made.run  # noqa: B018 - the code that launches it and its place on the device are made when they are asked for

    def _tried(self, act: Callable[..., Any], *args: Any) -> Any:
        """Nothing of this is needed: what fails is told, and fails again, in front of everybody, where it is used."""
        try:
            return act(*args)
        except Exception as error:  # noqa: BLE001
            logger.warning(
                "a kernel could not be compiled ahead and is left to its first use: %s: %s", type(error).__name__, error
            )
            return None
