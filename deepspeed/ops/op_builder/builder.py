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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from deepspeed.errors import OpUnavailable
from deepspeed.ops.capability import on_cuda
from deepspeed.ops.cuda_arch import parse_arch_list
from deepspeed.ops.op_builder.cuda import (
    CUDAMismatchException,
    MissingCUDAException,
    assert_no_cuda_mismatch,
    get_default_compute_capabilities,
    installed_cuda_version,
    target_archs,
)
from deepspeed.ops.op_builder.toolchain import Toolchain
from deepspeed.ops.op_builder.versions import torch_versions

__all__ = [
    "CUDAMismatchException",
    "CUDAOpBuilder",
    "MissingCUDAException",
    "OpBuilder",
    "assert_no_cuda_mismatch",
    "get_default_compute_capabilities",
    "installed_cuda_version",
    "probe_is_compatible",
]

_OPS = Path(__file__).resolve().parents[1]


class OpBuilder(Toolchain, ABC):
    """One extension: its sources and flags, whether it can be built here, and the built module."""

    BUILD_VAR: str = ""
    NAME: str = ""

    def __init__(self, name: str) -> None:
        self.name = name
        self._loaded: Any = None

    @abstractmethod
    def absolute_name(self) -> str:
        """The module's name with its package, as an installed extension would have."""

    @abstractmethod
    def sources(self) -> list[str]:
        """The files to compile, absolute or below `deepspeed/ops`."""

    def include_paths(self) -> list[str]:
        """Folders of headers, absolute or below `deepspeed/ops`."""
        return []

    def cxx_args(self) -> list[str]:
        """Flags of the C++ compiler."""
        return ["-O3", "-std=c++17", "-Wno-reorder"]

    def nvcc_args(self) -> list[str]:
        """Flags of the CUDA compiler; sources without CUDA need none."""
        return []

    def extra_ldflags(self) -> list[str]:
        """Flags of the linker."""
        return []

    def hipify_extension(self) -> None:
        """Called before a build for ROCm; torch translates the sources itself, so that nothing is left to do."""

    def sycl_extension(self) -> None:
        """Called before a build for SYCL; a builder with sources of its own for it overrides this."""

    def is_compatible(self, verbose: bool = False) -> bool:
        """True if the extension can be built and run here; `verbose` logs why not."""
        return True

    @staticmethod
    def validate_torch_version(torch_info: Mapping[str, Any]) -> None:
        """Raise OpUnavailable if an extension built with these versions does not fit the running torch."""
        running: Mapping[str, Any] = torch_versions()
        for key in ("version", "cuda_version", "hip_version"):
            built = torch_info.get(key, "0.0")
            if built not in ("0.0", running[key]):
                raise OpUnavailable(
                    f"the extension was built with {key} {built}, but {running[key]} is running; build it again"
                )

    validate_torch_op_version = validate_torch_version

    def strip_empty_entries(self, args: Iterable[str]) -> list[str]:
        """Without the flags that are empty here."""
        return [arg for arg in args if arg]

    def deepspeed_src_path(self, code_path: str) -> str:
        """An absolute path as it is; any other below `deepspeed/ops`."""
        return str(_OPS / code_path)

    def builder(self) -> Any:
        """The extension for `setuptools`, to be built ahead of use."""
        from torch.utils.cpp_extension import CppExtension  # needs setuptools, which torch does not require

        return CppExtension(
            name=self.absolute_name(),
            sources=self._paths(self.sources()),
            include_dirs=self._paths(self.include_paths()),
            extra_compile_args={"cxx": self.strip_empty_entries(self.cxx_args())},
            extra_link_args=self.strip_empty_entries(self.extra_ldflags()),
        )

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
            sources=self._paths(self.sources()),
            extra_include_paths=self._paths(self.include_paths()),
            extra_cflags=self.strip_empty_entries(self.cxx_args()),
            extra_cuda_cflags=self.strip_empty_entries(self.nvcc_args()),
            extra_ldflags=self.strip_empty_entries(self.extra_ldflags()),
            verbose=verbose,
        )

    def _paths(self, paths: Iterable[str]) -> list[str]:
        return [self.deepspeed_src_path(path) for path in self.strip_empty_entries(paths)]


class CUDAOpBuilder(OpBuilder):
    """An extension with CUDA sources: the CUDA compiler must be of torch's major version."""

    def cuda_capability_major(self) -> int:
        """The major compute capability of the current GPU; 0 without one."""
        return torch.cuda.get_device_capability()[0] if on_cuda.holds else 0

    def filter_ccs(self, ccs: list[str]) -> list[list[str]]:
        """Of these architectures ("8.0", "9.0+PTX") the ones that the sources support, each as [major, minor]."""
        return [cc.split(".") for cc in ccs]

    def compute_capability_args(self, cross_compile_archs: str | None = None) -> list[str]:
        """One `-gencode` per architecture: those given, else of TORCH_CUDA_ARCH_LIST, else of the GPUs here."""
        archs = parse_arch_list(cross_compile_archs) if cross_compile_archs else target_archs()
        kept = self.filter_ccs([str(arch) for arch in archs])
        if archs and not kept:
            raise OpUnavailable(
                f"op {self.name!r} supports none of the GPU architectures {', '.join(map(str, archs))} to build for"
            )
        args = []
        for major, minor in kept:
            number = f"{major}{minor.removesuffix('+PTX')}"
            args.append(f"-gencode=arch=compute_{number},code=sm_{number}")
            if minor.endswith("+PTX"):
                args.append(f"-gencode=arch=compute_{number},code=compute_{number}")
        return args

    def version_dependent_macros(self) -> list[str]:
        """Macros that say which interfaces of torch there are."""
        return ["-DVERSION_GE_1_1", "-DVERSION_GE_1_3", "-DVERSION_GE_1_5"]

    def is_compatible(self, verbose: bool = False) -> bool:
        try:
            assert_no_cuda_mismatch(self.name)
        except (MissingCUDAException, CUDAMismatchException) as error:
            self.error_log = str(error)
            if verbose:
                self.warning(str(error))
            return False
        return super().is_compatible(verbose)

    def cxx_args(self) -> list[str]:
        return ["-O3", "-std=c++17", "-g", "-Wno-reorder", *self.version_dependent_macros()]

    def nvcc_args(self) -> list[str]:
        return ["-O3", "-std=c++17", *self.version_dependent_macros(), *self.compute_capability_args()]

    def libraries_args(self) -> list[str]:
        """Libraries beside torch's to link with."""
        return []

    def builder(self) -> Any:
        from torch.utils.cpp_extension import CUDAExtension

        args = {"cxx": self.cxx_args(), "nvcc": self.nvcc_args()}
        return CUDAExtension(
            name=self.absolute_name(),
            sources=self._paths(self.sources()),
            include_dirs=self._paths(self.include_paths()),
            libraries=self.strip_empty_entries(self.libraries_args()),
            extra_compile_args={compiler: self.strip_empty_entries(flags) for compiler, flags in args.items()},
            extra_link_args=self.strip_empty_entries(self.extra_ldflags()),
        )


def probe_is_compatible(builder: OpBuilder, verbose: bool = False) -> bool:
    """The builder's own answer; one that cannot even ask is not compatible, and says why if `verbose`."""
    try:
        return builder.is_compatible(verbose)
    except (OSError, RuntimeError, ImportError, ValueError) as error:
        if verbose:
            builder.warning(f"{type(error).__name__}: {error}")
        return False
