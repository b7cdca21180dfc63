"""The builders of the library's own ops under their published names.

Nothing has to be compiled: `load()` imports and returns the module that holds the op, such as `deepspeed.ops.adam` with
its optimizers. An op that comes with a feature yet to be built is not compatible, and loading it says what brings it.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, ClassVar

from deepspeed.errors import OpUnavailable
from deepspeed.ops.capability import has_gds
from deepspeed.ops.op_builder.builder import OpBuilder

# builder → the name of its op, and the module that holds it
INCLUDED: dict[str, tuple[str, str]] = {
    "FusedAdamBuilder": ("fused_adam", "deepspeed.ops.adam"),
    "CPUAdamBuilder": ("cpu_adam", "deepspeed.ops.adam"),
    "FusedLambBuilder": ("fused_lamb", "deepspeed.ops.lamb"),
    "FusedLionBuilder": ("fused_lion", "deepspeed.ops.lion"),
    "CPULionBuilder": ("cpu_lion", "deepspeed.ops.lion"),
    "CPUAdagradBuilder": ("cpu_adagrad", "deepspeed.ops.adagrad"),
    "TransformerBuilder": ("transformer", "deepspeed.ops.transformer"),
    "PinMemoryBuilder": ("pin_memory", "deepspeed.ops.aio.handle"),
    "AsyncIOBuilder": ("async_io", "deepspeed.ops.aio.handle"),
    "GDSBuilder": ("gds", "deepspeed.ops.aio.gds"),
}
# builder → the name of its op, and the feature that brings it
TO_COME: dict[str, tuple[str, str]] = {
    "DeepCompileBuilder": ("dc", "DeepCompile"),
    "EvoformerAttnBuilder": ("evoformer_attn", "kernels"),
    "FPQuantizerBuilder": ("fp_quantizer", "kernels"),
    "InferenceBuilder": ("transformer_inference", "inference"),
    "InferenceCoreBuilder": ("inference_core_ops", "FastGen"),
    "InferenceCutlassBuilder": ("cutlass_ops", "FastGen"),
    "QuantizerBuilder": ("quantizer", "ZeRO++"),
    "RaggedOpsBuilder": ("ragged_device_ops", "FastGen"),
    "RaggedUtilsBuilder": ("ragged_ops", "FastGen"),
    "RandomLTDBuilder": ("random_ltd", "data efficiency"),
    "SparseAttnBuilder": ("sparse_attn", "sparse attention"),
    "SpatialInferenceBuilder": ("spatial_inference", "inference"),
}


class Included(OpBuilder):
    """An op that comes with the package, in the module `home`."""

    home: ClassVar[str]

    def __init__(self) -> None:
        super().__init__(self.NAME)

    def absolute_name(self) -> str:
        return self.home

    def sources(self) -> list[str]:
        return []

    def jit_load(self, verbose: bool = True) -> Any:
        return importlib.import_module(self.home)


class UnbuiltOp(OpBuilder):
    """An op of a feature that this version does not have."""

    feature: ClassVar[str]

    def __init__(self) -> None:
        super().__init__(self.NAME)
        self.error_log = f"this version does not have it; it comes with {self.feature}"

    def absolute_name(self) -> str:
        return f"deepspeed.ops.{self.name}"

    def sources(self) -> list[str]:
        return []

    def is_compatible(self, verbose: bool = False) -> bool:
        if verbose:
            self.warning(f"this version does not have it; it comes with {self.feature}")
        return False


class _GpuDirect(Included):
    def is_compatible(self, verbose: bool = False) -> bool:
        if not has_gds.holds and verbose:
            self.warning(has_gds.verdict.reason)
        return has_gds.holds

    def jit_load(self, verbose: bool = True) -> Any:
        if not has_gds.holds:
            raise OpUnavailable(
                f"op {self.NAME!r} needs GPUDirect Storage: {has_gds.verdict.reason}. aio_handle of AsyncIOBuilder "
                f"takes tensors of a GPU too, by way of the memory of the host"
            )
        return super().jit_load(verbose)


@functools.cache
def builder_class(name: str) -> type[Included] | type[UnbuiltOp]:
    """The builder of this published name."""
    if name in INCLUDED:
        op, home = INCLUDED[name]
        base = _GpuDirect if op == "gds" else Included
        return type(name, (base,), {"NAME": op, "home": home, "__doc__": f"Loads {home}."})
    op, feature = TO_COME[name]
    return type(name, (UnbuiltOp,), {"NAME": op, "feature": feature, "__doc__": f"Comes with {feature}."})


@functools.cache
def all_ops() -> dict[str, OpBuilder]:
    """Every op of the library by its name."""
    made = [builder_class(name)() for name in (*INCLUDED, *TO_COME)]
    return {builder.NAME: builder for builder in made}


def installed_ops() -> dict[str, bool]:
    """Which ops come with the package, so that nothing has to be built for them."""
    return {name: isinstance(builder, Included) for name, builder in all_ops().items()}


def compatible_ops() -> dict[str, bool]:
    """Which ops can be used on this machine."""
    return {name: builder.is_compatible() for name, builder in all_ops().items()}
