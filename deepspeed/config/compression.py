"""The sections `compression_training`, `quantize_training` and `weight_quantization`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from operator import attrgetter
from typing import Annotated, Any, Generic, Literal, TypeVar

from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator, BeforeValidator, model_validator

from .model import (
    Count,
    Lower,
    Names,
    NoEffect,
    Number,
    Patterns,
    PositiveCount,
    Section,
    key,
    no_effect,
    raise_together,
)

Bits = Annotated[PositiveCount, Le(16)]
Ratio = Annotated[Number, Gt(0), Le(1)]
QuantizationType = Annotated[Literal["symmetric", "asymmetric"], Lower]
Rounding = Annotated[Literal["nearest", "stochastic"], Lower]
_BLOCK = re.compile(r"([1-9]\d*)x([1-9]\d*)")


def _block(pattern: str) -> str:
    if _BLOCK.fullmatch(pattern) is None:
        raise ValueError(f"expected rows x columns of a block, such as 4x1, found {pattern!r}")
    return pattern


def block_of(pattern: str) -> tuple[int, int]:
    """Rows and columns of a pattern."""
    rows, columns = map(int, pattern.split("x"))
    return rows, columns


BlockPattern = Annotated[str, AfterValidator(_block)]
"""The size of blocks of a weight, such as 4x1."""
_KERNEL = "all devices round by the same operations"


_METHOD = "l1: the smallest at init_compression go. topk: scores are trained, the lowest go."


class TechniqueShared(Section):
    """What the groups of a technique share."""

    enabled: bool = key(False, "Whether the technique is used.")
    schedule_offset: Count = key(1000, "Optimizer steps before it begins.")


class TechniqueGroup(Section):
    """Modules that a technique treats alike."""

    modules: Patterns = key(["*"], 'Regular expressions, searched in the names of modules; "*" is all that fit.')
    related_modules: list[Names] | None = key(
        None,
        "For each of these, names of modules that get smaller with it when redundancy_clean removes what is pruned.",
    )

    def problems(self, path: str) -> Iterator[str]:
        """What contradicts itself."""
        if not self.modules:
            yield f'{path}.modules is empty; name modules, or write ["*"]'
        if self.related_modules is not None and len(self.related_modules) != len(self.modules):
            yield (
                f"{path}.related_modules has {len(self.related_modules)} lists, and modules {len(self.modules)} "
                "patterns; give one list for each"
            )


class MixedQuantizeConfig(Section):
    """A slow change from a weight to its rounded value."""

    enabled: bool = key(False, "Whether the model computes with a mean of both.")
    quantize_change_ratio: Ratio = key(0.001, "By how much the share of the weight falls in each step, from 1.")


class WeightQuantizationShared(TechniqueShared):
    """How weights are rounded."""

    schedule_offset: Count = key(0, "Optimizer steps before it begins.")
    quantizer_kernel: bool = no_effect(False, _KERNEL)
    quantize_groups: PositiveCount = key(1, "Groups of a weight, each with its own scale; must divide its elements.")
    quantize_verbose: bool = key(False, "Whether each change of the number of bits is logged.")
    quantization_type: QuantizationType = key("symmetric", "Whether codes lie around zero or span least to largest.")
    rounding: Rounding = key("nearest", "Whether a number becomes the nearest code, or one of both beside it by odds.")
    quantize_weight_in_forward: bool = key(
        False,
        "True rounds weights anew in every forward. False rounds them once after each optimizer step, and keeps the "
        "result for the passes of the next one; masters stay as precise as they are.",
    )
    fp16_mixed_quantize: MixedQuantizeConfig = key(MixedQuantizeConfig, "A slow change to rounded weights.")
    store_integers: bool = key(
        False,
        "Whether redundancy_clean leaves integers of 8, 4, 2 or 1 bits with their scales, rather than rounded floats.",
    )


class WeightQuantizationParams(Section):
    """Bits of a group."""

    start_bits: Bits | None = key(None, "Bits at schedule_offset; must be given.")
    target_bits: Bits | None = key(None, "Bits at the end; must be given.")
    quantization_period: PositiveCount = key(1, "Steps until the first bit is dropped; each later one takes twice.")


class WeightQuantizationGroup(TechniqueGroup):
    """Weights of the same bits."""

    params: WeightQuantizationParams = key(WeightQuantizationParams, "Bits of its weights.")


class ActivationQuantizationShared(TechniqueShared):
    """How inputs of layers are rounded."""

    quantization_type: QuantizationType = key("symmetric", "Whether codes lie around zero or span least to largest.")
    range_calibration: Annotated[Literal["dynamic", "static"], Lower] = key(
        "dynamic", "dynamic: the range of each token. static: a moving mean of the ranges seen in training."
    )


class ActivationQuantizationParams(Section):
    """Bits of a group."""

    bits: Annotated[Bits, Ge(2)] | None = key(None, "Bits of inputs; must be given.")


class ActivationQuantizationGroup(TechniqueGroup):
    """Layers whose inputs have the same bits."""

    params: ActivationQuantizationParams = key(ActivationQuantizationParams, "Bits of its inputs.")


Of = TypeVar("Of", bound=TechniqueShared)
"""What the groups of a technique share: it makes sections of equal keys those of one technique."""


class PruningParams(Section, Generic[Of]):
    """How much of a group is kept."""

    dense_ratio: Ratio | None = key(None, "Share that is kept; must be given.")


class PruningGroup(TechniqueGroup, Generic[Of]):
    """Layers of which the same share is kept."""

    params: PruningParams[Of] = key(PruningParams, "How much of it is kept.")


_SNIP = NoEffect(
    "compression_training.sparse_pruning.shared_parameters.method is not snip_momentum",
    lambda schema: schema.compression_training.sparse_pruning.shared_parameters.method != "snip_momentum",
)


class SparsePruningShared(TechniqueShared):
    """How single weights are removed."""

    method: Annotated[Literal["l1", "topk", "snip_momentum"], Lower] = key(
        "l1",
        f"{_METHOD} snip_momentum: blocks on which the loss depends least go step by step.",
    )
    block_pattern: BlockPattern = key("4x1", "Of snip_momentum: rows x columns of the blocks that go together.", _SNIP)
    dense_ratio: Ratio = key(0.1, "Of snip_momentum: share kept where no group says it.", _SNIP)
    schedule_offset_stride: PositiveCount = key(1, "Of snip_momentum: steps between two removals.", _SNIP)
    schedule_offset_end: Count | None = key(
        None, "Of snip_momentum: step of the last removal; null: all go at schedule_offset.", _SNIP
    )
    excluded_modules: Patterns = key([], "Of snip_momentum: regular expressions of modules that stay whole.", _SNIP)


class PruningShared(TechniqueShared):
    """How rows or channels are removed."""

    method: Annotated[Literal["l1", "topk"], Lower] = key("l1", _METHOD)


class RowPruningShared(PruningShared):
    """How outputs of linear layers are removed."""


class ChannelPruningShared(PruningShared):
    """How channels of convolutions are removed."""


class HeadPruningShared(PruningShared):
    """How attention heads are removed."""

    method: Annotated[Literal["l1", "topk"], Lower] = key("topk", _METHOD)
    num_heads: PositiveCount | None = key(None, "Heads of an attention; must be given where heads are pruned.")


def _groups_of(technique: str) -> Any:
    """The key of the groups of a technique, which has no effect where that is off."""
    switch = f"compression_training.{technique}.shared_parameters.enabled"
    why = f"{switch} is not given, and false by default"
    off = NoEffect(why, lambda schema: not attrgetter(switch)(schema), unless=switch)
    return key({}, "Name of a group → its modules, and what is done to them.", off)


class Technique(Section):
    """Base of a technique: what its groups share, and the groups."""

    @property
    def _complete(self) -> bool:
        """Whether the groups must be there, and say all that they do not share."""
        return True

    def problems(self, path: str) -> Iterator[str]:
        """What is missing or contradicts itself, each text with its key; nothing of a technique that is off."""
        shared: TechniqueShared = self.shared_parameters  # type: ignore[attr-defined]
        if not shared.enabled:
            return
        groups: dict[str, TechniqueGroup] = self.different_groups  # type: ignore[attr-defined]
        if not groups and self._complete:
            yield f"{path}.different_groups is missing; name at least one group with params and modules"
        for name, group in groups.items():
            at = f"{path}.different_groups.{name}"
            yield from group.problems(at)
            params: Section = group.params  # type: ignore[attr-defined]
            for each in type(params).model_fields:
                if self._complete and getattr(params, each) is None:
                    yield f"{at}.params.{each} is missing"


class WeightQuantizationTechnique(Technique):
    """Weights in few bits."""

    shared_parameters: WeightQuantizationShared = key(WeightQuantizationShared, "What the groups share.")
    different_groups: dict[str, WeightQuantizationGroup] = _groups_of("weight_quantization")

    def problems(self, path: str) -> Iterator[str]:
        yield from super().problems(path)
        shared = self.shared_parameters
        plain = shared.quantization_type == "symmetric" and shared.rounding == "nearest"
        for name, group in self.different_groups.items() if shared.enabled else ():
            at, start, target = f"{path}.different_groups.{name}.params", *_both(group.params)
            if target > start:
                yield f"{at}.target_bits ({target}) exceeds start_bits ({start})"
            if target < 3 and not plain:
                yield (
                    f"{at}.target_bits is {target}; 1 and 2 bits need quantization_type symmetric and rounding "
                    f"nearest, found {shared.quantization_type} and {shared.rounding}"
                )
            if shared.store_integers and target not in (1, 2, 4, 8):
                yield f"{at}.target_bits is {target}; store_integers needs 8, 4, 2 or 1"


def _both(params: WeightQuantizationParams) -> tuple[int, int]:
    return params.start_bits or 16, params.target_bits or 8


class ActivationQuantizationTechnique(Technique):
    """Inputs of layers in few bits."""

    shared_parameters: ActivationQuantizationShared = key(ActivationQuantizationShared, "What the groups share.")
    different_groups: dict[str, ActivationQuantizationGroup] = _groups_of("activation_quantization")


class SparsePruningTechnique(Technique):
    """Weights without most of their elements."""

    shared_parameters: SparsePruningShared = key(SparsePruningShared, "What the groups share.")
    different_groups: dict[str, PruningGroup[SparsePruningShared]] = _groups_of("sparse_pruning")

    @property
    def _complete(self) -> bool:
        return self.shared_parameters.method != "snip_momentum"

    def problems(self, path: str) -> Iterator[str]:
        yield from super().problems(path)
        shared, at = self.shared_parameters, f"{path}.shared_parameters"
        if self._complete or not shared.enabled:
            return
        first, last = shared.schedule_offset, shared.schedule_offset_end
        if last is not None and last < first:
            yield f"{at}.schedule_offset_end ({last}) is before schedule_offset ({first})"
        elif (first if last is None else last) == 0:
            yield f"{at}.schedule_offset is 0, where snip_momentum has seen no gradient yet; give 1 or more"


class RowPruningTechnique(Technique):
    """Linear layers without some of their outputs."""

    shared_parameters: RowPruningShared = key(RowPruningShared, "What the groups share.")
    different_groups: dict[str, PruningGroup[RowPruningShared]] = _groups_of("row_pruning")


class HeadPruningTechnique(Technique):
    """Attention without some of its heads; modules are its output layers."""

    shared_parameters: HeadPruningShared = key(HeadPruningShared, "What the groups share.")
    different_groups: dict[str, PruningGroup[HeadPruningShared]] = _groups_of("head_pruning")

    def problems(self, path: str) -> Iterator[str]:
        yield from super().problems(path)
        if self.shared_parameters.enabled and self.shared_parameters.num_heads is None:
            yield f"{path}.shared_parameters.num_heads is missing; give the number of heads of an attention"


class ChannelPruningTechnique(Technique):
    """Convolutions without some of their output channels."""

    shared_parameters: ChannelPruningShared = key(ChannelPruningShared, "What the groups share.")
    different_groups: dict[str, PruningGroup[ChannelPruningShared]] = _groups_of("channel_pruning")


class LayerReductionConfig(Section):
    """A student with fewer layers than its teacher, which start as some of the teacher's."""

    enabled: bool = key(False, "Whether init_compression copies layers of the teacher into the model.")
    keep_number_layer: PositiveCount | None = key(None, "Layers of the student; null: those of teacher_layer.")
    module_name_prefix: str = key("", "Path of the layers in both models: layer i is <prefix>.<i>.")
    teacher_layer: list[Count] = key([], "The teacher's layer of each layer of the student, in their order.")
    other_module_name: Names = key([], "Paths of further modules that are copied.")

    def problems(self, path: str) -> Iterator[str]:
        """What is missing or contradicts itself."""
        if not self.enabled:
            return
        if not self.teacher_layer:
            yield f"{path}.teacher_layer is missing; list the teacher's layer for each layer of the student"
        if not self.module_name_prefix:
            yield f"{path}.module_name_prefix is missing; give the path of the layers, such as bert.encoder.layer"
        if self.keep_number_layer is not None and self.keep_number_layer != len(self.teacher_layer):
            yield (
                f"{path}.keep_number_layer is {self.keep_number_layer}, and teacher_layer lists "
                f"{len(self.teacher_layer)} layers; they must be as many"
            )


class CompressionConfig(Section):
    """Quantisation, pruning and smaller students, while training."""

    weight_quantization: WeightQuantizationTechnique = key(WeightQuantizationTechnique, "Weights in few bits.")
    activation_quantization: ActivationQuantizationTechnique = key(
        ActivationQuantizationTechnique, "Inputs of layers in few bits."
    )
    sparse_pruning: SparsePruningTechnique = key(SparsePruningTechnique, "Single weights or blocks removed.")
    row_pruning: RowPruningTechnique = key(RowPruningTechnique, "Outputs of linear layers removed.")
    head_pruning: HeadPruningTechnique = key(HeadPruningTechnique, "Heads of attention removed.")
    channel_pruning: ChannelPruningTechnique = key(ChannelPruningTechnique, "Channels of convolutions removed.")
    layer_reduction: LayerReductionConfig = key(LayerReductionConfig, "Layers copied from a teacher.")

    @model_validator(mode="after")
    def _rules(self) -> CompressionConfig:
        raise_together([text for name in type(self).model_fields for text in getattr(self, name).problems(name)])
        return self


class QuantizeBitsConfig(Section):
    """Bits of MoQ."""

    start_bits: Bits = key(16, "Bits at schedule_offset.")
    target_bits: Bits = key(8, "Bits at the end.")


class QuantizeScheduleConfig(Section):
    """When MoQ drops bits."""

    quantize_period: PositiveCount = key(1000, "Steps until the first bit is dropped; each later one takes twice.")
    schedule_offset: Count = key(0, "Optimizer steps before it begins.")


class QuantizeAlgorithmConfig(Section):
    """How MoQ rounds."""

    q_type: QuantizationType = key("symmetric", "Whether codes lie around zero or span least to largest.")
    rounding: Rounding = key("nearest", "Whether a number becomes the nearest code, or one of both beside it by odds.")


class MixedTrainingConfig(MixedQuantizeConfig):
    """As of a group of modules."""


class QuantizeTrainingConfig(Section):
    """Mixture of quantisation (MoQ): every weight loses bits on a schedule, after optimizer steps."""

    enabled: bool = key(False, "Whether the weights of linear, convolutional and embedding layers are quantised.")
    quantize_bits: QuantizeBitsConfig = key(QuantizeBitsConfig, "Bits of weights.")
    quantize_schedule: QuantizeScheduleConfig = key(QuantizeScheduleConfig, "When bits are dropped.")
    quantize_groups: PositiveCount = key(1, "Groups of a weight, each with its own scale; must divide its elements.")
    quantize_algo: QuantizeAlgorithmConfig = key(QuantizeAlgorithmConfig, "How numbers are rounded.")
    quantize_verbose: bool = key(False, "Whether each change of the number of bits is logged.")
    quantizer_kernel: bool = no_effect(False, _KERNEL)
    fp16_mixed_quantize: MixedTrainingConfig = key(MixedTrainingConfig, "A slow change to rounded weights.")

    @model_validator(mode="after")
    def _rules(self) -> QuantizeTrainingConfig:
        bits, algorithm = self.quantize_bits, self.quantize_algo
        plain = algorithm.q_type == "symmetric" and algorithm.rounding == "nearest"
        problems = []
        if bits.target_bits > bits.start_bits:
            problems.append(f"quantize_bits.target_bits ({bits.target_bits}) exceeds start_bits ({bits.start_bits})")
        if bits.target_bits < 3 and not plain:
            problems.append(
                f"quantize_bits.target_bits is {bits.target_bits}; 1 and 2 bits need quantize_algo.q_type symmetric "
                "and rounding nearest"
            )
        raise_together(problems if self.enabled else [])
        return self


class EigenvalueConfig(Section):
    """How much the loss bends along the weights of each block, for the pace of MoQ."""

    enabled: bool = key(False, "Whether periods of a block are multiplied by 1 + floor(4 * its share of the largest).")
    verbose: bool = key(False, "Whether eigenvalues are logged.")
    max_iter: PositiveCount = key(100, "Most products with the Hessian for a block.")
    tol: Annotated[Number, Gt(0)] = key(1e-2, "Change of an eigenvalue, as a share, that ends the iteration.")
    stability: Annotated[Number, Ge(0)] = key(1e-6, "Added to norms.")
    gas_boundary_resolution: PositiveCount = key(1, "Optimizer steps between two computations.")
    layer_name: str = key("bert.encoder.layer", "Path of the list of blocks.")
    layer_num: Count = key(0, "How many of the blocks count, from the first on; 0: all.")


_OF_GROUPS = "quantized_initialization and post_init_quant have widths and groups of their own"


class WeightGroups(Section):
    """Width and groups of weights."""

    num_bits: Literal[4, 8] = key(8, "Width of the codes.")
    group_size: PositiveCount = key(128, "Neighbouring elements that share a scale; it divides the dim.")
    group_dim: Literal[0, 1] = key(1, "The dim along which elements are neighbours.")
    symmetric: bool = key(False, "Whether a group has a scale alone; false adds the middle of its range.")

    @model_validator(mode="after")
    def _codes_share_bytes(self) -> WeightGroups:
        if self.num_bits == 4 and self.group_size % 2:
            raise ValueError(
                f"group_size is {self.group_size} with num_bits 4, of which two share a byte; use an even group_size"
            )
        return self


class InitialWeightGroups(WeightGroups):
    """Width and groups of weights that rest so from the first on."""


def _absent(value: Any) -> Any:
    return None if value == {} else value


class WeightQuantizationConfig(Section):
    """Frozen weights in few bits, for training beside them or for inference."""

    enabled: bool = key(True, "Whether the section counts.")
    num_bits: Literal[4, 8] = no_effect(8, _OF_GROUPS)
    q_type: Literal["symmetric", "asymmetric"] = no_effect("symmetric", _OF_GROUPS)
    q_groups: PositiveCount = no_effect(1, _OF_GROUPS)
    quantized_initialization: Annotated[InitialWeightGroups | None, BeforeValidator(_absent)] = key(
        None,
        "Linear layers and embeddings that zero.Init builds rest so, frozen (stage 3); null and {} are off.",
        NoEffect("weight_quantization.enabled is false", lambda c: not c.weight_quantization.enabled),
    )
    post_init_quant: dict[str, WeightGroups] = key(
        {},
        "Parts of names → how linear layers and embeddings of the model rest, frozen, from initialize on (any stage).",
        NoEffect("weight_quantization.enabled is false", lambda c: not c.weight_quantization.enabled),
    )

    @property
    def at_birth(self) -> WeightGroups | None:
        """What `zero.Init` does; None: nothing."""
        return self.quantized_initialization if self.enabled else None
