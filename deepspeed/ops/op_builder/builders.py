"""The builders of the library's own ops under their published names.

Nothing has to be compiled: `load()` imports and returns the module that holds the op, such as `deepspeed.ops.adam` with
its optimizers. DeepCompile has no op of its own.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, ClassVar

from deepspeed.errors import OpUnavailable
from deepspeed.ops.capability import has_gds
from deepspeed.ops.op_builder.builder import OpBuilder

# builder → the name of its op, and the module that holds it
BUILDERS: dict[str, tuple[str, str]] = {
    "FusedAdamBuilder": ("fused_adam", "deepspeed.ops.adam"),
    "CPUAdamBuilder": ("cpu_adam", "deepspeed.ops.adam"),
    "FusedLambBuilder": ("fused_lamb", "deepspeed.ops.lamb"),
    "FusedLionBuilder": ("fused_lion", "deepspeed.ops.lion"),
    "CPULionBuilder": ("cpu_lion", "deepspeed.ops.lion"),
    "CPUAdagradBuilder": ("cpu_adagrad", "deepspeed.ops.adagrad"),
    "TransformerBuilder": ("transformer", "deepspeed.ops.transformer"),
    "PinMemoryBuilder": ("pin_memory", "deepspeed.ops.aio.handle"),
    "AsyncIOBuilder": ("async_io", "deepspeed.ops.aio.handle"),
    "GDSBuilder": ("gds", "deepspeed.ops.aio.handle"),
    "EvoformerAttnBuilder": ("evoformer_attn", "deepspeed.ops.evoformer"),
    "FPQuantizerBuilder": ("fp_quantizer", "deepspeed.ops.fp_quantizer"),
    "InferenceBuilder": ("transformer_inference", "deepspeed.ops.generate.streaming"),
    "InferenceCoreBuilder": ("inference_core_ops", "deepspeed.ops.generate.packed"),
    "InferenceCutlassBuilder": ("cutlass_ops", "deepspeed.ops.grouped"),
    "QuantizerBuilder": ("quantizer", "deepspeed.ops.quantizer.quantizer"),
    "RaggedOpsBuilder": ("ragged_device_ops", "deepspeed.ops.generate.attention"),
    "RaggedUtilsBuilder": ("ragged_ops", "deepspeed.ops.generate.pages"),
    "RandomLTDBuilder": ("random_ltd", "deepspeed.ops.random_ltd"),
    "SparseAttnBuilder": ("sparse_attn", "deepspeed.ops.sparse_attention"),
    "SpatialInferenceBuilder": ("spatial_inference", "deepspeed.ops.spatial"),
}


class LibraryOp(OpBuilder):
    """An op of the table."""

    origin: ClassVar[str]
    """The module that holds it."""

    def __init__(self) -> None:
        super().__init__(self.NAME)

    def absolute_name(self) -> str:
        return self.origin

    def sources(self) -> list[str]:
        return []

    def is_compatible(self, verbose: bool = False) -> bool:
        missing = self.NAME == "gds" and not has_gds.holds
        if missing and verbose:
            self.warning(has_gds.reason)
        return not missing

    def jit_load(self, verbose: bool = True) -> Any:
        if self.is_compatible():
            return importlib.import_module(self.origin)
        raise OpUnavailable(
            f"op {self.name!r} needs GPUDirect Storage: {has_gds.reason}. aio_handle of AsyncIOBuilder takes tensors "
            "of a GPU too, by way of the memory of the host"
        )


@functools.cache
def builder_class(name: str) -> type[LibraryOp]:
    """The builder of this published name."""
    op, origin = BUILDERS[name]
    return type(name, (LibraryOp,), {"NAME": op, "origin": origin, "__doc__": f"Loads op {op}, of {origin}."})


@functools.cache
def all_ops() -> dict[str, LibraryOp]:
    return {op: builder_class(name)() for name, (op, _) in BUILDERS.items()}


def installed_ops() -> dict[str, bool]:
    """Which ops come with the package, so that nothing has to be built for them."""
    return dict.fromkeys(all_ops(), True)


def compatible_ops() -> dict[str, bool]:
    """Which ops can be used on this machine."""
    return {name: builder.is_compatible() for name, builder in all_ops().items()}
