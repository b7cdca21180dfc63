"""Facts about this machine that an implementation may require; each knows the reason for its answer.

    needs = has_triton & on_cuda & compute_capability(9)
    needs.holds     False
    needs.reason    "the package triton is not installed; the accelerator in use is cpu"

A fact about the machine is looked up once, when it is first asked for; asking never raises.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from deepspeed.accelerator import get_accelerator

# What asking for, or loading, a driver, a package or a tool can raise. Anything else is a mistake in the code.
FAILURES = (OSError, ImportError, RuntimeError, ValueError, LookupError, AttributeError, subprocess.SubprocessError)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Whether a fact holds, and what was found: a phrase that reads well after "because"."""

    holds: bool
    reason: str


class Capability:
    """A fact, or several joined with `&`; one that is not `lasting` is looked up at every question."""

    def __init__(self, name: str, probe: Callable[[], ProbeResult], *, lasting: bool = True) -> None:
        self.name = name
        self._probe = probe
        self._lasting = lasting
        self._known: ProbeResult | None = None

    @property
    def verdict(self) -> ProbeResult:
        """The answer; a probe that fails means no for now, with the error as the reason."""
        if self._known is not None:
            return self._known
        try:
            verdict = self._probe()
        except FAILURES as error:
            found = (str(error).splitlines() or [""])[0]
            return ProbeResult(False, f"{self.name} could not be determined: {type(error).__name__}: {found}")
        if self._lasting:
            self._known = verdict
        return verdict

    @property
    def holds(self) -> bool:
        return self.verdict.holds

    @property
    def reason(self) -> str:
        return self.verdict.reason

    def __bool__(self) -> bool:
        return self.holds

    def __and__(self, other: Capability) -> Capability:
        def probe() -> ProbeResult:
            failing = [fact.reason for fact in (self, other) if not fact.holds]
            if failing:
                return ProbeResult(False, _joined(failing))
            return ProbeResult(True, _joined([self.reason, other.reason]))

        return Capability(f"{self.name} & {other.name}", probe, lasting=False)


def _joined(reasons: list[str]) -> str:
    """Each reason once, in order, without the empty ones."""
    return "; ".join(dict.fromkeys(part for reason in reasons if reason for part in reason.split("; ")))


def _fact(name: str, *, lasting: bool = True) -> Callable[[Callable[[], ProbeResult]], Capability]:
    return lambda probe: Capability(name, probe, lasting=lasting)


always = Capability("always", lambda: ProbeResult(True, ""))


@_fact("triton")
def has_triton() -> ProbeResult:
    # Looked for, not imported: importing it takes longer than the rest of the library.
    if importlib.util.find_spec("triton") is None:
        return ProbeResult(False, "the package triton is not installed")
    for distribution in ("triton", "pytorch-triton", "triton-rocm", "pytorch-triton-rocm", "triton-windows"):
        try:
            return ProbeResult(True, f"triton {importlib.metadata.version(distribution)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ProbeResult(True, "triton of an unknown version")


@_fact("cuda", lasting=False)  # another accelerator may be set
def on_cuda() -> ProbeResult:
    name = get_accelerator()._name
    if name != "cuda":
        return ProbeResult(False, f"the accelerator in use is {name}")
    if torch.version.hip is not None:
        return ProbeResult(False, f"the accelerator in use is ROCm {torch.version.hip}")
    return ProbeResult(True, f"CUDA {torch.version.cuda}")


def compute_capability(major: int, minor: int = 0) -> Capability:
    """The current NVIDIA GPU is at least of this compute capability."""

    def probe() -> ProbeResult:
        if not on_cuda.holds:
            return on_cuda.verdict
        found = torch.cuda.get_device_capability()
        text = f"{torch.cuda.get_device_name()} has compute capability {found[0]}.{found[1]}"
        if found < (major, minor):
            return ProbeResult(False, f"{text}, {major}.{minor} is needed")
        return ProbeResult(True, text)

    return Capability(f"compute capability {major}.{minor}", probe, lasting=False)


@_fact("kernels with e4m3", lasting=False)
def has_e4m3() -> ProbeResult:
    return compute_capability(8, 9).verdict  # below it Triton has no code for e4m3


@_fact("products of numbers with block scales", lasting=False)
def has_block_scales() -> ProbeResult:
    if not on_cuda.holds:
        return on_cuda.verdict
    found, version = torch.cuda.get_device_capability(), torch.version.cuda or "0.0"
    text = f"{torch.cuda.get_device_name()} of compute capability {found[0]}.{found[1]}, CUDA {version}"
    fits = found == (9, 0) and tuple(map(int, version.split(".")[:2])) >= (12, 9)
    return ProbeResult(fits, text if fits else f"{text}; cuBLAS scales blocks of 128 on 9.0 with CUDA 12.9 and later")


def cxx_compiler() -> str | None:
    """The C++ compiler that a build would use: `$CXX`, else the first of c++, g++ and clang++ on PATH."""
    wanted = os.environ.get("CXX")
    if wanted:
        return shutil.which(wanted.split()[0])
    return next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)


def nvcc() -> str | None:
    """The CUDA compiler: below `$CUDA_HOME` or `$CUDA_PATH`, else on PATH, else at its usual place."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    given = [str(Path(home, "bin", "nvcc")) for home in homes]
    return next((path for name in (*given, "nvcc", "/usr/local/cuda/bin/nvcc") if (path := shutil.which(name))), None)


@_fact("a C++ compiler")
def has_cxx_compiler() -> ProbeResult:
    path = cxx_compiler()
    if path is not None:
        return ProbeResult(True, f"C++ compiler {path}")
    wanted = os.environ.get("CXX")
    found = f"CXX={wanted} is no program" if wanted else "there is no c++, g++ or clang++ on PATH"
    return ProbeResult(False, found)


@functools.lru_cache(None)
def _cpu_flags() -> frozenset[str]:
    """The instruction sets that the processor names, as Linux writes them."""
    flags: set[str] = set()
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("flags", "Features"):
                flags.update(value.split())
                break
    if platform.machine().lower() in ("arm64", "aarch64"):
        flags.add("asimd")  # part of the architecture; other systems do not list it
    level = torch.backends.cpu.get_cpu_capability()
    flags.update({"AVX2": ("avx2",), "AVX512": ("avx2", "avx512f")}.get(level, ()))
    return frozenset(flags)


def _instruction_set(flag: str, name: str) -> Capability:
    def probe() -> ProbeResult:
        found = flag in _cpu_flags()
        machine = platform.machine() or "unknown"
        return ProbeResult(found, f"the processor ({machine}) has {'' if found else 'no '}{name}")

    return Capability(name, probe)


has_avx2 = _instruction_set("avx2", "AVX2")
has_avx512 = _instruction_set("avx512f", "AVX-512")
has_neon = _instruction_set("asimd", "NEON")
has_sve = _instruction_set("sve", "SVE")


@_fact("GPUDirect Storage", lasting=False)
def has_gds() -> ProbeResult:
    if not on_cuda.holds:
        return on_cuda.verdict
    library = ctypes.util.find_library("cufile")
    if library is None:
        return ProbeResult(False, "the library libcufile is not installed")
    if not Path("/proc/driver/nvidia-fs").exists():
        return ProbeResult(False, f"{library} is there, but the kernel module nvidia-fs is not loaded")
    return ProbeResult(True, f"{library} with nvidia-fs")


_ARCHITECTURE = re.compile(r"\d+\.\d[a-z]?(\+PTX)?", re.IGNORECASE)
_FAMILIES = ("Volta", "Turing", "Ampere", "Ada", "Hopper", "Blackwell")  # names that PyTorch's own builds accept


def check_arch_list(text: str) -> None:
    """Refuse a `TORCH_CUDA_ARCH_LIST`, separated by `;`, `,` or spaces, with an entry that no build accepts."""
    for entry in re.split(r"[;,\s]+", text.strip()):
        if entry and entry.title() not in ("Native", *_FAMILIES) and _ARCHITECTURE.fullmatch(entry) is None:
            raise ValueError(
                f"TORCH_CUDA_ARCH_LIST: {entry!r} is not a GPU architecture; expected entries such as "
                f"8.0, 9.0a or 9.0+PTX, or one of {', '.join(_FAMILIES)}"
            )
