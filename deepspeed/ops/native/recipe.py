"""What a compiled library is made of: sources, compiler, flags and processor; together they are its key.

recipe.key       the same for the same library: a name in a cache that machines may share
recipe.command   what makes it
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from deepspeed.errors import OpUnavailable
from deepspeed.ops.capability import cxx_compiler, has_cxx_compiler

__all__ = ["Recipe", "recipes"]

SOURCES = Path(__file__).resolve().parents[1] / "csrc"

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
