"""`Toolchain`: what a build of an extension may ask about this machine: compilers, libraries, processor, ROCm."""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from deepspeed.log import logger
from deepspeed.ops.capability import cxx_compiler, has_avx2, has_avx512, has_neon

__all__ = ["Toolchain"]

_ROCM_VERSION = ".info/version"


class Toolchain:
    """Facts for a build; every answer is looked up, none needs a GPU."""

    name: str
    error_log: str | None = None
    """The last warning, kept for the error of a build that cannot begin."""

    def warning(self, msg: str) -> None:
        """Log why something cannot be built, and remember it."""
        self.error_log = msg
        logger.warning("op %s: %s", self.name, msg)

    def command_exists(self, cmd: str | Sequence[str]) -> bool:
        """True if this program, or any of several, is on PATH; else a warning names them."""
        programs = [cmd] if isinstance(cmd, str) else list(cmd)
        found = any(shutil.which(program) for program in programs)
        if not found:
            self.warning(f"of the programs {', '.join(programs)}, at least one of which is needed, none is on PATH")
        return found

    def has_function(
        self,
        funcname: str,
        libraries: Sequence[str],
        library_dirs: Sequence[str] | None = None,
        verbose: bool = False,
    ) -> bool:
        """True if a program that calls this C function can be linked with these libraries."""
        compiler = cxx_compiler()
        if compiler is None:
            return False
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.cpp")
            source.write_text(f'extern "C" char {funcname}(void);\nint main() {{ return {funcname}(); }}\n')
            places = [f"-L{place}" for place in library_dirs or ()]
            command = [compiler, str(source), "-o", str(Path(folder, "probe")), *places]
            done = subprocess.run(
                [*command, *(f"-l{library}" for library in libraries)], capture_output=True, text=True, check=False
            )
        if verbose and done.returncode:
            logger.warning("op %s: a program that calls %s cannot be linked: %s", self.name, funcname, done.stderr)
        return done.returncode == 0

    def cpu_arch(self) -> str:
        """The compiler flag for code of exactly this processor."""
        return "-mcpu=native" if platform.machine() == "ppc64le" else "-march=native"

    def simd_width(self) -> str:
        """The macro that names the widest vector instructions."""
        widths = ((has_avx512, "-D__AVX512__"), (has_avx2, "-D__AVX256__"), (has_neon, "-D__NEON__"))
        return next((macro for fact, macro in widths if fact), "-D__SCALAR__")

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """True if torch was built for ROCm."""
        return torch.version.hip is not None

    @staticmethod
    def is_sycl_enabled() -> bool:
        """True if torch can use an Intel GPU here, and a SYCL compiler is on PATH."""
        return torch.xpu.is_available() and shutil.which("icpx") is not None

    @staticmethod
    def installed_rocm_version() -> tuple[int, int]:
        """Major and minor version of the ROCm below `$ROCM_HOME` (or /opt/rocm); (0, 0) if there is none."""
        place = Path(os.environ.get("ROCM_HOME", "/opt/rocm"), _ROCM_VERSION)
        found = re.match(r"(\d+)\.(\d+)", place.read_text(encoding="utf-8")) if place.is_file() else None
        return (int(found[1]), int(found[2])) if found else (0, 0)

    @staticmethod
    def get_rocm_gpu_arch() -> str:
        """`$PYTORCH_ROCM_ARCH`, else the first GPU that `rocminfo` names, such as gfx90a; "" without one."""
        given = os.environ.get("PYTORCH_ROCM_ARCH")
        if given:
            return given
        found = re.search(r"\bgfx[0-9a-f]+\b", _rocminfo())
        return found[0] if found else ""

    @staticmethod
    def get_rocm_wavefront_size() -> str:
        """`$ROCM_WAVEFRONT_SIZE`, else the first GPU's as `rocminfo` says, else "32"."""
        given = os.environ.get("ROCM_WAVEFRONT_SIZE")
        if given:
            return given
        gpu = _rocminfo().partition("gfx")[2]  # processors are listed before GPUs
        found = re.search(r"Wavefront Size:\s*(\d+)", gpu)
        return found[1] if found else "32"


@functools.lru_cache(None)
def _rocminfo() -> str:
    program = shutil.which("rocminfo")
    if program is None:
        return ""
    return subprocess.run([program], capture_output=True, text=True, check=False).stdout
