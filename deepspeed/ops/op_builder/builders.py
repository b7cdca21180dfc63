"""The builders of the library's own ops under their published names.

Nothing has to be compiled: an op that this version has is loaded as a module of functions with the published
signatures. An op that comes with a feature yet to be built is not compatible, and loading it says what brings it.
"""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

from deepspeed.errors import OpUnavailable
from deepspeed.ops.capability import has_gds
from deepspeed.ops.op_builder.builder import CUDAOpBuilder, OpBuilder
from deepspeed.ops.registry import operations

__all__ = [
    "AsyncIOBuilder",
    "CPUAdagradBuilder",
    "CPUAdamBuilder",
    "CPULionBuilder",
    "DeepCompileBuilder",
    "EvoformerAttnBuilder",
    "FPQuantizerBuilder",
    "FusedAdamBuilder",
    "FusedLambBuilder",
    "FusedLionBuilder",
    "GDSBuilder",
    "InferenceBuilder",
    "InferenceCoreBuilder",
    "InferenceCutlassBuilder",
    "NotImplementedBuilder",
    "PinMemoryBuilder",
    "QuantizerBuilder",
    "RaggedOpsBuilder",
    "RaggedUtilsBuilder",
    "RandomLTDBuilder",
    "SparseAttnBuilder",
    "SpatialInferenceBuilder",
    "StochasticTransformerBuilder",
    "TransformerBuilder",
    "UtilsBuilder",
]

_KERNELS = "deepspeed.ops.op_builder.kernels"


class _Named(OpBuilder):
    """A builder that knows its name; `name` is only given by a builder made of it."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name or self.NAME)

    def sources(self) -> list[str]:
        return []


class _Included(_Named):
    """An op that comes with the package: functions over the operations of the registry."""

    operation: ClassVar[str | None] = None
    """The operation of the registry behind it; None if torch alone does it."""

    def __init__(self) -> None:
        super().__init__()

    def absolute_name(self) -> str:
        return f"{_KERNELS}.{self.NAME}"

    def is_compatible(self, verbose: bool = False) -> bool:
        if self.operation is None or any(way.requires.holds for way in operations()[self.operation].implementations):
            return True
        if verbose:
            reasons = "; ".join(line.reason for line in operations()[self.operation].explain())
            self.warning(f"no implementation runs here ({reasons})")
        return False

    def builder(self) -> Any:
        raise OpUnavailable(f"op {self.NAME!r} comes with the package: there is nothing to compile; use load()")

    def jit_load(self, verbose: bool = True) -> Any:
        return importlib.import_module(self.absolute_name())


class _ToCome(_Named):
    """An op of a feature that this version does not have."""

    feature: ClassVar[str]

    def absolute_name(self) -> str:
        return f"deepspeed.ops.{self.name}"

    def is_compatible(self, verbose: bool = False) -> bool:
        if verbose:
            self.warning(self._reason())
        return False

    def builder(self) -> Any:
        raise OpUnavailable(f"op {self.name!r} cannot be built: {self._reason()}")

    def jit_load(self, verbose: bool = True) -> Any:
        raise OpUnavailable(f"op {self.name!r} cannot be loaded: {self._reason()}")

    def _reason(self) -> str:
        return f"this version does not have it; it comes with {self.feature}"


class FusedAdamBuilder(_Included, CUDAOpBuilder):
    """`multi_tensor_adam`: Adam and AdamW over lists of tensors."""

    BUILD_VAR = "DS_BUILD_FUSED_ADAM"
    NAME = "fused_adam"
    operation = "adam"


class FusedLambBuilder(_Included, CUDAOpBuilder):
    """`lamb`: the LAMB update of one tensor."""

    BUILD_VAR = "DS_BUILD_FUSED_LAMB"
    NAME = "fused_lamb"
    operation = "lamb"


class FusedLionBuilder(_Included, CUDAOpBuilder):
    """`multi_tensor_lion`: Lion over lists of tensors."""

    BUILD_VAR = "DS_BUILD_FUSED_LION"
    NAME = "fused_lion"
    operation = "lion"


class CPUAdamBuilder(_Included, CUDAOpBuilder):
    """`create_adam`, `adam_update`, `destroy_adam`: Adam of one tensor in host memory."""

    BUILD_VAR = "DS_BUILD_CPU_ADAM"
    NAME = "cpu_adam"
    operation = "adam"


class CPUAdagradBuilder(_Included, CUDAOpBuilder):
    """`create_adagrad`, `adagrad_update`, `destroy_adagrad`: Adagrad of one tensor in host memory."""

    BUILD_VAR = "DS_BUILD_CPU_ADAGRAD"
    NAME = "cpu_adagrad"
    operation = "adagrad"


class CPULionBuilder(_Included, CUDAOpBuilder):
    """`create_lion`, `lion_update`, `destroy_lion`: Lion of one tensor in host memory."""

    BUILD_VAR = "DS_BUILD_CPU_LION"
    NAME = "cpu_lion"
    operation = "lion"


class UtilsBuilder(_Included):
    """`flatten` and `unflatten`: several tensors as one, and back."""

    BUILD_VAR = "DS_BUILD_UTILS"
    NAME = "utils"


class NotImplementedBuilder(_ToCome):
    """Stands for an op that no version has."""

    BUILD_VAR = "DS_BUILD_NOT_IMPLEMENTED"
    NAME = "not_implemented"
    feature = "nothing that is planned"


class AsyncIOBuilder(_Included, CUDAOpBuilder):
    """`aio_handle`: reads and writes of files beside the computation."""

    BUILD_VAR = "DS_BUILD_AIO"
    NAME = "async_io"


class GDSBuilder(AsyncIOBuilder):
    """`gds_handle`: files to and from the memory of a GPU, past the memory of the host."""

    BUILD_VAR = "DS_BUILD_GDS"
    NAME = "gds"

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


class PinMemoryBuilder(_Included):
    """`pin_handle`: host memory that stays in place."""

    BUILD_VAR = "DS_BUILD_PIN_MEMORY"
    NAME = "pin_memory"


class DeepCompileBuilder(_ToCome, CUDAOpBuilder):
    """Operations of compiled graphs over sharded parameters."""

    BUILD_VAR = "DS_BUILD_DEEP_COMPILE"
    NAME = "dc"
    feature = "DeepCompile"

    def __init__(self) -> None:
        super().__init__()


class EvoformerAttnBuilder(_ToCome, CUDAOpBuilder):
    """Attention of Evoformer with two biases."""

    BUILD_VAR = "DS_BUILD_EVOFORMER_ATTN"
    NAME = "evoformer_attn"
    feature = "kernels"


class FPQuantizerBuilder(_ToCome, CUDAOpBuilder):
    """Floating point numbers of 4, 6, 8 and 12 bits."""

    BUILD_VAR = "DS_BUILD_FP_QUANTIZER"
    NAME = "fp_quantizer"
    feature = "kernels"


class QuantizerBuilder(_ToCome, CUDAOpBuilder):
    """Integers of 4 and 8 bits, for communication and compression."""

    BUILD_VAR = "DS_BUILD_QUANTIZER"
    NAME = "quantizer"
    feature = "ZeRO++"


class InferenceBuilder(_ToCome, CUDAOpBuilder):
    """The layers of transformers in inference."""

    BUILD_VAR = "DS_BUILD_TRANSFORMER_INFERENCE"
    NAME = "transformer_inference"
    feature = "inference"


class InferenceCoreBuilder(_ToCome, CUDAOpBuilder):
    """Layers of inference over ragged batches."""

    BUILD_VAR = "DS_BUILD_INFERENCE_CORE_OPS"
    NAME = "inference_core_ops"
    feature = "FastGen"


class InferenceCutlassBuilder(_ToCome, CUDAOpBuilder):
    """Matrix products of inference with quantised weights and experts."""

    BUILD_VAR = "DS_BUILD_CUTLASS_OPS"
    NAME = "cutlass_ops"
    feature = "FastGen"


class RaggedOpsBuilder(_ToCome, CUDAOpBuilder):
    """Attention and caches of ragged batches."""

    BUILD_VAR = "DS_BUILD_RAGGED_DEVICE_OPS"
    NAME = "ragged_device_ops"
    feature = "FastGen"


class RaggedUtilsBuilder(_ToCome, CUDAOpBuilder):
    """Host memory of ragged batches."""

    BUILD_VAR = "DS_BUILD_RAGGED_OPS"
    NAME = "ragged_ops"
    feature = "FastGen"


class RandomLTDBuilder(_ToCome, CUDAOpBuilder):
    """Sampling of tokens in the middle layers."""

    BUILD_VAR = "DS_BUILD_RANDOM_LTD"
    NAME = "random_ltd"
    feature = "data efficiency"


class SparseAttnBuilder(_ToCome, CUDAOpBuilder):
    """Attention over blocks."""

    BUILD_VAR = "DS_BUILD_SPARSE_ATTN"
    NAME = "sparse_attn"
    feature = "sparse attention"


class SpatialInferenceBuilder(_ToCome, CUDAOpBuilder):
    """Layers of diffusion models in inference."""

    BUILD_VAR = "DS_BUILD_SPATIAL_INFERENCE"
    NAME = "spatial_inference"
    feature = "inference"


class TransformerBuilder(_ToCome, CUDAOpBuilder):
    """The layer of BERT in training; `deepspeed.ops.transformer` has it, and needs no op that is built."""

    BUILD_VAR = "DS_BUILD_TRANSFORMER"
    NAME = "transformer"
    feature = "deepspeed.ops.transformer"

    def _reason(self) -> str:
        return f"nothing is built for this layer; it comes with {self.feature}"


class StochasticTransformerBuilder(TransformerBuilder):
    """The layer of BERT in training, with layers left out."""

    BUILD_VAR = "DS_BUILD_STOCHASTIC_TRANSFORMER"
    NAME = "stochastic_transformer"

    def __init__(self) -> None:
        super().__init__()
