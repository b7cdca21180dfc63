"""`OpBuilder`: compiles an extension of C++ or CUDA sources when it is first needed; the base of every builder.

A builder of one's own names its module and its sources:

    class ScaleBuilder(OpBuilder):
        NAME = "scale"

        def __init__(self) -> None:
            super().__init__(name=self.NAME)

        def absolute_name(self) -> str:
            return "my_package.scale_op"

        def sources(self) -> list[str]:
            return ["/path/to/scale.cpp"]

    ScaleBuilder().load().scale(tensor)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from deepspeed.errors import OpUnavailable
from deepspeed.log import logger

__all__ = ["OpBuilder"]


class OpBuilder(ABC):
    """One extension: its sources and flags, whether it can be built here, and the built module."""

    NAME: str = ""
    error_log: str | None = None
    """The last warning, kept for the error of a build that cannot begin."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._loaded: Any = None

    @abstractmethod
    def absolute_name(self) -> str:
        """The module's name with its package, as an installed extension would have."""

    @abstractmethod
    def sources(self) -> list[str]:
        """The files to compile: absolute paths. Those that end in `.cu` go to the CUDA compiler."""

    def include_paths(self) -> list[str]:
        """Folders of headers: absolute paths."""
        return []

    def cxx_args(self) -> list[str]:
        """Flags of the C++ compiler."""
        return ["-O3", "-std=c++17", "-Wno-reorder"]

    def nvcc_args(self) -> list[str]:
        """Flags of the CUDA compiler; architectures are those of TORCH_CUDA_ARCH_LIST, or of the GPUs here."""
        return []

    def extra_ldflags(self) -> list[str]:
        """Flags of the linker."""
        return []

    def is_compatible(self, verbose: bool = False) -> bool:
        """True if the extension can be built and run here; `verbose` logs why not."""
        return True

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """True if torch was built for ROCm."""
        return torch.version.hip is not None

    def warning(self, msg: str) -> None:
        """Log why something cannot be built, and remember it."""
        self.error_log = msg
        logger.warning("op %s: %s", self.name, msg)

    def load(self, verbose: bool = False) -> Any:
        """The module, built if it has to be; one builder builds once."""
        if self._loaded is None:
            self._loaded = self.jit_load(verbose)
        return self._loaded

    def jit_load(self, verbose: bool = True) -> Any:
        """Compile now (torch keeps what did not change) and import."""
        if not self.is_compatible(verbose):
            raise OpUnavailable(f"op {self.name!r} cannot be built here: {self.error_log or 'its builder says so'}")
        from torch.utils import cpp_extension  # needs setuptools, which torch does not require

        return cpp_extension.load(
            name=self.name,
            sources=[path for path in self.sources() if path],
            extra_include_paths=[path for path in self.include_paths() if path],
            extra_cflags=[flag for flag in self.cxx_args() if flag],
            extra_cuda_cflags=[flag for flag in self.nvcc_args() if flag],
            extra_ldflags=[flag for flag in self.extra_ldflags() if flag],
            verbose=verbose,
        )
