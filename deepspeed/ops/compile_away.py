"""Kernels of Triton compiled by processes beside this one, which write its cache; see [Note: forked workers]."""

from __future__ import annotations

import fcntl
import importlib
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

from deepspeed.log import logger
from deepspeed.ops.forked import CAN_FORK, forked

__all__ = ["Missing", "cached_only", "compile_away", "workers"]

Compile = Callable[[], Any]
"""Lets Triton compile a kernel, and returns it."""

_TOO_FEW_CORES = 3
_TOO_MUCH_MEMORY = 16 << 30
"""A fork takes time for all of it, and what is written while the other process lives is there twice."""


class Missing(Exception):
    """A kernel is not in Triton's cache."""


def workers(most: int) -> int:
    """How many processes of this rank may compile, `most` at most; 0 where it compiles in its own threads.

    With two cores nothing is gained, and without Triton's usual cache there is no way for kernels to come back.
    """
    knobs = importlib.import_module("triton").knobs
    settings = knobs.compilation
    if not CAN_FORK or knobs.cache.manager_class is not None:
        return 0
    if settings.always_compile or settings.override or settings.dump_ir:
        return 0
    cores = len(os.sched_getaffinity(0)) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return 0 if cores < _TOO_FEW_CORES or _memory() > _TOO_MUCH_MEMORY else min(cores - 1, most)


def _memory() -> int:
    """Bytes that this process has to itself."""
    facts = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(facts["RssAnon"].split()[0]) << 10


@contextmanager
def cached_only() -> Iterator[None]:
    """What this thread lets Triton compile in the meantime is in its cache, or raises `Missing`.

    Triton tells that only by beginning to compile, so that this is where it is stopped.
    """
    source = importlib.import_module("triton.compiler.compiler").ASTSource
    make, here = source.make_ir, threading.get_ident()

    def make_ir(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == here:
            raise Missing
        return make(self, *args, **kwargs)

    source.make_ir = make_ir
    try:
        yield
    finally:
        source.make_ir = make


def compile_away(
    kernels: Sequence[Compile],
    count: int,
    heard: Callable[[int, float], None],
    stop: threading.Event,
    *,
    quiet: AbstractContextManager[Any],
    launchers: bool,
) -> list[int]:
    """Compile these in `count` processes at most; `heard(which, seconds)` is called when one is in the cache.

    While `quiet` is held no other thread of this process is in Triton. `launchers` are built with a C compiler, by
    versions of Triton that do so. Returns those that are left to the caller.
    """
    driver = importlib.import_module("triton.runtime").driver
    active = driver.active
    elsewhere = _Elsewhere(active, active.get_current_device(), active.get_current_target())

    def work(piece: int) -> float:
        driver.set_active(elsewhere)
        spent: list[float] = []
        importlib.import_module("triton").knobs.compilation.listener = _Stopwatch(spent)
        made = kernels[piece]()
        if launchers:
            with locks.held(_launcher_of(made.src)):  # the first of those that share one builds it, the others find it
                elsewhere.launcher_cls(made.src, made.metadata)
        return sum(spent)

    try:
        with closing(_Locks()) as locks:
            return forked(work, len(kernels), min(len(kernels), count), heard, stop=stop, quiet=quiet)
    except OSError as error:
        logger.warning("no process could be made to compile kernels (%s): threads of this one do it", error)
        return list(range(len(kernels)))


def _launcher_of(source: Any) -> tuple[str, ...]:
    """Equal for kernels that are launched by the same code: to which types an address leads is nothing to it."""
    types = getattr(source, "signature", {}).values()
    return tuple("*" if str(each).startswith("*") else str(each) for each in types)


class _Locks:
    """One for each key, between processes that are forked from this one; who ends lets go of his."""

    def __init__(self) -> None:
        self._file = os.memfd_create("deepspeed-locks")

    @contextmanager
    def held(self, key: Hashable) -> Iterator[None]:
        """Wait for the lock of `key`, and hold it."""
        place = hash(key) & 0x7FFFFFFF
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, place)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, place)

    def close(self) -> None:
        """In the process that made it, after all others."""
        os.close(self._file)


class _Stopwatch:
    """A listener of Triton's compiler that notes seconds; 0 for what was there."""

    def __init__(self, spent: list[float]) -> None:
        self._spent = spent

    def __call__(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        """A kernel is there."""
        self._spent.append(0.0 if cache_hit else times.total / 1e6)


class _Elsewhere:
    """Stands for Triton's driver where there is no device: answers what compiling asks, as it was in the parent."""

    def __init__(self, driver: Any, device: int, target: Any) -> None:
        self._driver, self._device, self._target = driver, device, target

    def get_current_device(self) -> int:
        """The parent's."""
        return self._device

    def get_current_stream(self, _device: int) -> int:
        """Nothing is launched."""
        return 0

    def get_current_target(self) -> Any:
        """The parent's."""
        return self._target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)
