"""`library(name)`: the compiled `csrc/<name>.cpp`, built at its first use on this machine and kept.

Sources, compiler, flags and processor are together the key of a library: its name in a cache that machines may share.

[Note: no lock can hang] A library is compiled under a name of its own and renamed. Processes that start together let
one of them compile: they wait for a lock that the system takes from a process that ends, however it ends, and not for
longer than a build takes. A process that has waited in vain compiles too; both results are the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shlex
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from deepspeed.errors import OpUnavailable, UsageError
from deepspeed.ops.capability import cxx_compiler, has_cxx_compiler

_TIMEOUT_S = 300.0
_LAST_LINES = 6


def library(name: str) -> ctypes.CDLL:
    """The loaded library; a build that failed is not tried again by this process."""
    found = _outcome(name)
    if isinstance(found, str):
        raise OpUnavailable(found)
    return found


@functools.lru_cache(None)
def _outcome(name: str) -> ctypes.CDLL | str:
    """The library, or why there is none."""
    try:
        return _loaded(name)
    except (OpUnavailable, OSError, subprocess.SubprocessError) as error:
        return str(error)


def _loaded(name: str) -> ctypes.CDLL:
    *better, plain = recipes(name)
    for recipe in better:
        with contextlib.suppress(OpUnavailable):  # a compiler that does not know this processor
            return _made(recipe)
    return _made(plain)


def _made(recipe: Recipe) -> ctypes.CDLL:
    try:
        place = folder()
    except OSError:  # no home, or one that is read-only: compiled for this process alone
        with tempfile.TemporaryDirectory(prefix="deepspeed-native-") as once:
            return _opened(recipe, Path(once))
    return _opened(recipe, place)


def _opened(recipe: Recipe, folder: Path) -> ctypes.CDLL:
    place = folder / f"{recipe.key}.so"
    keep(place, lambda output: _compile(recipe, output))
    try:
        return ctypes.CDLL(str(place))
    except OSError:  # damaged since: a disk that lost what it had promised
        place.unlink(missing_ok=True)
        keep(place, lambda output: _compile(recipe, output))
        return ctypes.CDLL(str(place))


def _compile(recipe: Recipe, output: Path) -> None:
    command = recipe.command(output)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S, errors="replace"
        )
    except subprocess.TimeoutExpired as error:
        raise OpUnavailable(
            f"{recipe.compiler[0]} took more than {_TIMEOUT_S:.0f} s for {recipe.source.name}"
        ) from error
    if done.returncode:
        told = "\n".join((done.stderr or done.stdout).strip().splitlines()[-_LAST_LINES:])
        raise OpUnavailable(f"{' '.join(command)} failed with exit code {done.returncode}:\n{told}")


SOURCES = Path(__file__).resolve().parents[0] / "csrc"

_FLAGS = (
    *("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-fno-exceptions", "-fno-rtti"),
    # square roots become instructions; results do not depend on what the vectoriser made of a loop
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
)

# Lines of /proc/cpuinfo that decide which instructions a compiler uses for the processor it runs on.
_TELLING = (
    *("flags", "model name", "cpu family", "model", "vendor_id"),
    *("Features", "CPU implementer", "CPU part", "CPU variant", "CPU architecture"),
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way to compile a source file of `csrc`."""

    source: Path
    compiler: tuple[str, ...]
    flags: tuple[str, ...]
    target: str
    """The compiler's version and, if instructions are chosen for it, the processor."""

    @property
    def key(self) -> str:
        """A name for what comes out; headers count as well."""
        parts = [*self.compiler, *self.flags, self.target]
        parts += [each.name + "\n" + each.read_text(encoding="utf-8") for each in sorted(SOURCES.iterdir())]
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        return f"{self.source.stem}-{digest[:24]}"

    def command(self, output: Path) -> list[str]:
        """What compiles the source into a shared library."""
        return [*self.compiler, *self.flags, str(self.source), "-o", str(output)]


def recipes(name: str) -> list[Recipe]:
    """How `csrc/<name>.cpp` may be compiled here, the best first: for this very processor, and for any."""
    found = cxx_compiler()
    if found is None:
        raise OpUnavailable(f"{name}.cpp is compiled at first use: {has_cxx_compiler.reason}; install g++ or set CXX")
    compiler = (found, *shlex.split(os.environ.get("CXX", ""))[1:])
    version = _version(compiler)
    source = SOURCES / f"{name}.cpp"
    processor = _processor()
    plain = Recipe(source, compiler, _FLAGS, f"{version}\n{platform.machine()}")
    if not processor:
        return [plain]
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    return [Recipe(source, compiler, (*_FLAGS, native), f"{version}\n{processor}"), plain]


@functools.lru_cache(None)
def _version(compiler: tuple[str, ...]) -> str:
    return subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout


@functools.lru_cache(None)
def _processor() -> str:
    """The processors of this machine, as far as instructions go; empty where that cannot be told."""
    if sys.platform != "linux":
        return ""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    telling = {line for line in lines if line.partition(":")[0].strip() in _TELLING}
    named = any(line.startswith(("flags", "Features")) for line in telling)
    return "\n".join(sorted(telling)) if named else ""


_PATIENCE_S = 60.0
_POLL_S = 0.05
_STALE_S = 3600.0
_UNFINISHED = ".unfinished"


def folder() -> Path:
    """The cache, made if need be: below `$TORCH_EXTENSIONS_DIR`, `$XDG_CACHE_HOME` or ~/.cache, private to the user."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    place = Path(given, "deepspeed_native") if given else Path(cache, "deepspeed", "native")
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = place.stat()
    # What lies there is executed: nobody else may have put it there.
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OpUnavailable(
            f"{place} holds compiled code, but belongs to user {found.st_uid} with mode "
            f"{stat.S_IMODE(found.st_mode):o}; it must be yours and writable by you alone. Remove it, or set "
            "TORCH_EXTENSIONS_DIR to another folder"
        )
    return place


def keep(place: Path, make: Callable[[Path], None]) -> Path:
    """`place`, where `make` has put a file; it is called with another path, unless the file is there already."""
    if place.exists():
        return place
    with _turn(place.with_suffix(".lock")):
        if place.exists():
            return place
        _tidy(place.parent)
        handle, name = tempfile.mkstemp(prefix=place.stem, suffix=_UNFINISHED, dir=place.parent)
        os.close(handle)
        unfinished = Path(name)
        try:
            make(unfinished)
            with unfinished.open("rb+") as made:
                os.fsync(made.fileno())
            unfinished.replace(place)
        finally:
            unfinished.unlink(missing_ok=True)
    return place


@contextlib.contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Hold the lock, or go on without it after a while."""
    with path.open("a") as file:
        patience = time.monotonic() + _PATIENCE_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > patience:
                    break
                time.sleep(_POLL_S)
            except OSError:
                break  # a file system without locks
        yield


def _tidy(place: Path) -> None:
    """Remove what builds that were killed long ago have left."""
    for left in place.glob(f"*{_UNFINISHED}"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_S:
                left.unlink()


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor of the host, to read or to write; valid while the tensor lives."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise UsageError(f"a contiguous tensor of the host was expected, not {tensor.device} and {tensor.stride()}")
    if not tensor.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """As an assignment between buffers of one size, but other threads run meanwhile."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
