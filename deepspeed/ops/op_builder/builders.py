"""The builders of the library's own ops under their published names.

Nothing has to be compiled: `load()` imports and returns the module that holds the op, such as `deepspeed.ops.adam` with
its optimizers. An op that comes with a feature yet to be built is not compatible, and loading it says what brings it.
"""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

from deepspeed.errors import OpUnavailable
from deepspeed.ops.capability import has_gds
from deepspeed.ops.op_builder.builder import OpBuilder

__all__ = [
    "TO_COME",
    "AsyncIOBuilder",
    "CPUAdagradBuilder",
    "CPUAdamBuilder",
    "CPULionBuilder",
    "FusedAdamBuilder",
    "FusedLambBuilder",
    "FusedLionBuilder",
    "GDSBuilder",
    "Included",
    "OpToCome",
    "PinMemoryBuilder",
    "TransformerBuilder",
    "to_come",
]

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


class OpToCome(OpBuilder):
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


class FusedAdamBuilder(Included):
    """Adam and AdamW over lists of tensors: `FusedAdam`."""

    NAME, home = "fused_adam", "deepspeed.ops.adam"


class CPUAdamBuilder(Included):
    """Adam of tensors in host memory: `DeepSpeedCPUAdam`."""

    NAME, home = "cpu_adam", "deepspeed.ops.adam"


class FusedLambBuilder(Included):
    """LAMB: `FusedLamb`."""

    NAME, home = "fused_lamb", "deepspeed.ops.lamb"


class FusedLionBuilder(Included):
    """Lion over lists of tensors: `FusedLion`."""

    NAME, home = "fused_lion", "deepspeed.ops.lion"


class CPULionBuilder(Included):
    """Lion of tensors in host memory: `DeepSpeedCPULion`."""

    NAME, home = "cpu_lion", "deepspeed.ops.lion"


class CPUAdagradBuilder(Included):
    """Adagrad of tensors in host memory: `DeepSpeedCPUAdagrad`."""

    NAME, home = "cpu_adagrad", "deepspeed.ops.adagrad"


class TransformerBuilder(Included):
    """The layer of BERT in training: `DeepSpeedTransformerLayer`."""

    NAME, home = "transformer", "deepspeed.ops.transformer"


class PinMemoryBuilder(Included):
    """`pin_handle`: host memory that stays in place."""

    NAME, home = "pin_memory", "deepspeed.ops.op_builder.kernels.pin_memory"


class AsyncIOBuilder(Included):
    """`aio_handle`: reads and writes of files concurrently with the computation."""

    NAME, home = "async_io", "deepspeed.ops.op_builder.kernels.async_io"


class GDSBuilder(Included):
    """`gds_handle`: files to and from the memory of a GPU, past the memory of the host."""

    NAME, home = "gds", "deepspeed.ops.op_builder.kernels.gds"

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


def to_come(name: str) -> type[OpToCome]:
    """The builder of this name, of an op that this version does not have."""
    op, feature = TO_COME[name]
    return type(name, (OpToCome,), {"NAME": op, "feature": feature, "__doc__": f"Comes with {feature}."})
