"""The `zero_optimization` section: what is sharded, in which bucket sizes, and what is offloaded, and how."""

from __future__ import annotations

from enum import Enum, IntEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Lt
from pydantic import BeforeValidator, Field, field_validator, model_validator

from .model import (
    Count,
    CountOrAuto,
    Elements,
    Folder,
    NoEffect,
    Number,
    OneOrMoreNames,
    PositiveCount,
    PositiveElements,
    Section,
    Share,
    Whole,
    key,
    no_effect,
    raise_together,
)

__all__ = [
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroLeafModuleConfig",
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
    "ZenFlowConfig",
    "ZeroStageEnum",
]


class OffloadDeviceEnum(str, Enum):
    """Where offloaded state lives."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """The kinds of state that `engine.offload_states` can move."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


def _not_offloaded(block: str, to: OffloadDeviceEnum | None = None) -> NoEffect:
    """The mark of keys of an offload block that matter once it offloads, or offloads to that device."""

    def stays(c: Any) -> bool:
        section = getattr(c.zero_optimization, block)
        if block == "offload_param" and c.zero_optimization.stage < ZeroStageEnum.weights:
            return False  # the mark of the whole block says so
        device = OffloadDeviceEnum.none if section is None else section.device
        return device is OffloadDeviceEnum.none if to is None else device is not to

    path = f"zero_optimization.{block}.device"
    return NoEffect(f"{path} is not {to.value if to else 'given'}", stays, unless="" if to else path)


class _Offload(Section):
    """What both offload blocks have in common."""

    device: OffloadDeviceEnum = key(
        OffloadDeviceEnum.none, "Where the state lives: none (the accelerator), cpu or nvme."
    )
    nvme_path: Folder
    pin_memory: bool

    @model_validator(mode="after")
    def _has_path(self) -> _Offload:
        if self.device is OffloadDeviceEnum.nvme and self.nvme_path is None:
            raise ValueError(
                'device is "nvme" but nvme_path is not given or empty; set nvme_path to a folder on a local disk, '
                'or device to "cpu"'
            )
        return self


_NVME_PATH = "Folder on a local NVMe disk for the swap files; required with device nvme."
_PIN_MEMORY = "Whether host buffers are page-locked, for faster copies to and from the device."
_PARAMETERS_STAY = _not_offloaded("offload_param", OffloadDeviceEnum.nvme)
_STATES_STAY = _not_offloaded("offload_optimizer", OffloadDeviceEnum.nvme)


class DeepSpeedZeroOffloadParamConfig(_Offload):
    """Parameter offload; it takes effect at ZeRO stage 3."""

    nvme_path: Folder = key(None, _NVME_PATH, _PARAMETERS_STAY)
    pin_memory: bool = key(True, _PIN_MEMORY, _not_offloaded("offload_param"))
    buffer_count: Count = key(5, "Number of host buffers through which parameters pass to NVMe.", _PARAMETERS_STAY)
    buffer_size: Elements = key(100_000_000, "Size of each of these buffers, in elements.", _PARAMETERS_STAY)
    max_in_cpu: Elements = key(
        1_000_000_000, "Number of parameter elements in host memory when the rest is on NVMe.", _PARAMETERS_STAY
    )


class DeepSpeedZeroOffloadOptimizerConfig(_Offload):
    """Optimizer state offload; the step then runs on the CPU. NVMe needs ZeRO stage 3."""

    nvme_path: Folder = key(None, _NVME_PATH, _STATES_STAY)
    pin_memory: bool = key(True, _PIN_MEMORY, _not_offloaded("offload_optimizer"))
    buffer_count: Count = key(
        4, "Number of host buffers for NVMe; at least one per optimizer state and one for the gradient.", _STATES_STAY
    )
    pipeline_read: bool = key(
        False, "Whether the next tile is read from NVMe while the current one is updated.", _STATES_STAY
    )
    pipeline_write: bool = key(
        False, "Whether the previous tile is written to NVMe while the current one is updated.", _STATES_STAY
    )
    fast_init: bool = no_effect(False, "moments on NVMe are written by the first step and never before")
    ratio: Share = key(
        1.0,
        "Share of the optimizer state stepped on the CPU (0 to 1); below 1 needs ZeRO stage 3.",
        _not_offloaded("offload_optimizer"),
    )
    super_offload: bool = key(
        False,
        "Whether a separate CPU worker steps asynchronously (SuperOffload; stage 3 on CUDA).",
        _not_offloaded("offload_optimizer"),
    )
    cpuadam_cores_perc: Share = key(
        0.8,
        "Share of the CPU cores given to that worker (0 to 1); used with super_offload only.",
        NoEffect(
            "zero_optimization.offload_optimizer.super_offload is off",
            lambda c: not (block := c.zero_optimization.offload_optimizer) or not block.super_offload,
        ),
    )

    @property
    def pipeline(self) -> bool:
        """Whether reading or writing overlaps with the update."""
        return self.pipeline_read or self.pipeline_write


DEFAULT_LEAF_MODULE_CLASSES: list[str] = [
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
]


class DeepSpeedZeroLeafModuleConfig(Section):
    """Modules below which stage 3 does not look: experts, of which each rank may use others."""

    classes: OneOrMoreNames = key(
        DEFAULT_LEAF_MODULE_CLASSES,
        "Classes, by fully qualified name, whose subtree is gathered whole; a list given here replaces the default "
        "list.",
    )
    names: OneOrMoreNames = key([], "Modules, by path in the model, whose subtree is gathered whole.")
    name_suffixes: OneOrMoreNames = key([], "Endings of module paths whose subtree is gathered whole.")


class ZenFlowConfig(Section):
    """ZenFlow; the presence of the block switches it on."""

    topk_ratio: Annotated[Number, Gt(0), Lt(1)] = key(
        0.1, "Share of the gradient columns that is applied on the device at once (above 0, below 1)."
    )
    select_strategy: Literal["auto", "step", "epoch"] = key(
        "auto", "Unit in which select_interval counts; auto selects anew once per epoch."
    )
    select_interval: CountOrAuto = key(
        "auto", "Number of steps or epochs between two selections of the important columns."
    )
    update_interval: CountOrAuto = key("auto", "Number of steps between two applications of the deferred gradients.")
    overlap_step: bool = key(False, "Whether the CPU update goes on while the script does, on a CPU as well.")
    offload: bool = key(
        False, "Whether the optimizer state of the selected columns is offloaded too; needs overlap_comm."
    )
    auto_ratio: Share = key(
        0.99, "Share of the parameters that must ask for an update before auto mode applies one (0 to 1)."
    )
    full_warm_up_rounds: Count = key(0, "Number of first steps that update every column.")
    pt_reserved_cores_perc: Share = key(
        0.5, "Share of the CPU threads kept for the training while that update goes on (0 to 1)."
    )
    steps_per_epoch: Count | None = key(None, "Number of steps in an epoch; null takes the length of the data loader.")

    @model_validator(mode="after")
    def _rules(self) -> ZenFlowConfig:
        problems = []
        select, update = self.select_interval, self.update_interval
        if self.select_strategy == "auto" and select != "auto":
            problems.append(
                f'select_interval is {select} while select_strategy is "auto"; choose "step" or "epoch", '
                "or leave the interval out"
            )
        if self.select_strategy != "auto" and select == "auto":
            problems.append(
                f'select_interval must be a number with select_strategy "{self.select_strategy}", found "auto"'
            )
        # Epochs become steps only when the loader's length is known, so they are compared by the engine.
        if self.select_strategy == "step" and select != "auto" and update != "auto" and update > select:
            problems.append(f"update_interval ({update}) must not exceed select_interval ({select})")
        raise_together(problems)
        return self


class ZeroStageEnum(IntEnum):
    """What ZeRO shards; each stage includes the one before."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


def _stage(value: Any) -> Any:
    try:
        number = float(value)
        return ZeroStageEnum(int(number) if number == int(number) else value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"expected ZeRO stage 0, 1, 2 or 3, found {value!r}") from None


class LoCoConfig(Section):
    """Error feedback for quantised gradients."""

    err_beta: Annotated[Number, Ge(0), Lt(1)] = Field(
        description="Share of the old compression error that is carried on (0, and below 1)."
    )
    reset_T: PositiveCount = Field(description="Number of optimizer steps after which the kept error is forgotten.")


class DeepSpeedZeroConfig(Section):
    """ZeRO: shards of optimizer state, gradients and parameters instead of copies on every rank."""

    renamed_under: ClassVar[str | None] = "zero_optimization"

    stage: Annotated[ZeroStageEnum, BeforeValidator(_stage)] = key(
        ZeroStageEnum.disabled,
        "What is sharded over the data-parallel ranks: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters "
        "too.",
    )

    # Gradients and their reduction
    overlap_comm: bool | None = key(
        None,
        "Whether gradients travel while backward goes on; null means yes. False waits for each bucket, at stage 3 "
        "until backward is over.",
    )
    reduce_scatter: bool = key(True, "Whether each gradient is reduced to its owner only, instead of to every rank.")
    reduce_bucket_size: PositiveElements = key(
        500_000_000, "Number of gradient elements reduced in one collective; if absent, by the ranks."
    )
    contiguous_gradients: bool = key(
        True, "Whether gradients are packed into flat buckets; false sends each by itself."
    )
    round_robin_gradients: bool = key(False, "Whether gradient ownership alternates between ranks (stages 1 and 2).")
    use_multi_rank_bucket_allreduce: bool = key(
        True, "Whether the slices of several ranks share one all-reduce (stages 1 and 2)."
    )
    compute_grad_norm: bool = key(
        True, "Whether the global gradient norm is computed; false needs stage 1 or 2 and no clipping."
    )
    ignore_unused_parameters: bool = key(
        True, "Whether a trained parameter without a gradient on any rank is accepted."
    )
    parameter_alignment: bool = key(
        False, "Whether each parameter starts at a 16-byte boundary of its flat buffer (stages 1 and 2)."
    )

    # Parameters
    allgather_bucket_size: Elements = key(
        500_000_000, "Number of updated elements gathered in one collective (stages 1 and 2)."
    )
    allgather_partitions: bool = no_effect(True, "updated parameters are always gathered in buckets")
    sub_group_size: Elements = key(1_000_000_000, "Number of elements that the optimizer updates at a time (stage 3).")
    prefetch_bucket_size: Elements = key(
        50_000_000,
        "Number of parameter elements gathered ahead of their use (stage 3).",
        alias="stage3_prefetch_bucket_size",
    )
    param_persistence_threshold: Elements = key(
        100_000,
        "Parameters of at most this many elements stay whole on every rank (stage 3).",
        alias="stage3_param_persistence_threshold",
    )
    model_persistence_threshold: Elements = key(
        2**63 - 1,
        "Limit on the sum of elements that stay whole for that reason (stage 3).",
        alias="stage3_model_persistence_threshold",
    )
    max_live_parameters: Elements = key(
        1_000_000_000,
        "Number of parameter elements that may be whole at a time (stage 3).",
        alias="stage3_max_live_parameters",
    )
    max_reuse_distance: Elements = key(
        1_000_000_000,
        "A parameter used again within this many elements is not released in between; from forward to backward only "
        "where this key is given (stage 3).",
        alias="stage3_max_reuse_distance",
    )
    gather_16bit_weights_on_model_save: bool = key(
        False,
        "Whether clients may gather whole 16-bit weights to save the model; `save_16bit_model` does so unless this is "
        "set to false, which makes it an error (stage 3).",
        alias="stage3_gather_16bit_weights_on_model_save",
    )
    module_granularity_threshold: Whole = key(
        0,
        "Modules with fewer parameter elements per submodule than this are gathered whole; 0 is off (stage 3).",
        alias="stage3_module_granularity_threshold",
    )
    use_all_reduce_for_fetch_params: bool = key(
        False,
        "Whether parameters are gathered by an all-reduce instead of an all-gather (stage 3).",
        alias="stage3_use_all_reduce_for_fetch_params",
    )
    allgather_sequential: bool = key(
        False,
        "Whether parameters are gathered one by one, without the copy through a bucket (stage 3).",
        alias="stage3_allgather_sequential",
    )
    leaf_module: DeepSpeedZeroLeafModuleConfig = key(
        DeepSpeedZeroLeafModuleConfig, "Modules whose whole subtree stage 3 gathers as one unit."
    )
    memory_efficient_linear: bool = no_effect(True, "no layer keeps a whole weight for backward at stage 3")
    override_module_apply: bool = key(True, "Whether Module.apply gathers the parameters that it visits (stage 3).")

    # Offload
    offload_param: DeepSpeedZeroOffloadParamConfig | None = key(
        None,
        "Where parameter shards live between uses (stage 3).",
        NoEffect(
            "zero_optimization.stage is below 3, so that every rank has all parameters on its device",
            lambda c: c.zero_optimization.stage < ZeroStageEnum.weights,
        ),
    )
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = key(
        None, "Where optimizer state lives and is updated (stages 1-3)."
    )
    zenflow: ZenFlowConfig | None = key(
        None, "Deferred CPU updates for the less important gradients; the block switches it on."
    )
    save_muon_momentum_buffer_in_memory: bool = no_effect(False, "the momentum is kept where the other states are")

    # ZeRO++ and MiCS
    zero_hpz_partition_size: Count = key(
        1,
        "Number of neighbouring ranks that share a second copy of the weights for backward; 0 and 1 are off (stage 3).",
    )
    zero_quantized_weights: bool = key(
        False, "Whether weights travel as codes: to whole parameters (stage 3), or after a step (stages 1 and 2)."
    )
    zero_quantized_weights_format: Literal["int8", "fp8", "int4"] = key(
        "int8",
        "In what they travel, and frozen ones rest.",
        NoEffect(
            "zero_optimization.zero_quantized_weights and zero_quantized_nontrainable_weights are off",
            lambda c: (
                not c.zero_optimization.zero_quantized_weights
                and not c.zero_optimization.zero_quantized_nontrainable_weights
            ),
        ),
    )
    zero_quantized_nontrainable_weights: bool = key(
        False, "Whether frozen weights rest as codes between their uses, and travel as these (stage 3)."
    )
    zero_quantized_gradients: bool = key(
        False,
        "Whether gradients travel as int4 codes: within nodes, then between them (stages 1 to 3).",
    )
    zeropp_loco_param: LoCoConfig | None = key(None, "Error feedback (LoCo) for zero_quantized_gradients; null is off.")
    mics_shard_size: Whole = key(
        -1,
        "Number of ranks that share one set of shards (MiCS), of which the others have copies; -1 means all ranks "
        "(stages 1-3).",
        NoEffect(
            "zero_optimization.stage is 0, where every rank has everything", lambda c: not c.zero_optimization.stage
        ),
    )
    mics_hierarchical_params_gather: bool = key(
        False,
        "Whether MiCS gathers in two steps, between nodes and then inside the node (stage 3).",
        NoEffect(
            "zero_optimization.mics_shard_size, which makes the groups, is not given",
            lambda c: c.zero_optimization.mics_shard_size < 1,
        ),
    )

    # Checkpoints and checks
    load_from_fp32_weights: bool = key(True, "Whether a checkpoint restores master weights from their fp32 copies.")
    elastic_checkpoint: bool = no_effect(False, "every checkpoint loads at any world size")
    pipeline_loading_checkpoint: bool = no_effect(False, "a rank reads only its own part of the files")
    log_trace_cache_warnings: bool = key(False, "Whether a change in the order of parameter use is logged (stage 3).")
    enable_sanity_checks: bool = key(False, "Whether internal consistency is checked at run time.")
    legacy_stage1: bool = key(False, "The first implementation of stage 1, which no longer exists; must be false.")

    @property
    def shards_states(self) -> bool:
        """Whether optimizer states are spread over ranks."""
        return self.stage >= ZeroStageEnum.optimizer_states

    @property
    def shards_gradients(self) -> bool:
        """Whether gradients are spread over ranks, too."""
        return self.stage >= ZeroStageEnum.gradients

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters are spread over ranks, too."""
        return self.stage >= ZeroStageEnum.weights

    @property
    def overlaps_comm(self) -> bool:
        """`overlap_comm`, with its null resolved."""
        return self.overlap_comm is not False

    @property
    def offloads_optimizer(self) -> bool:
        """Whether optimizer state leaves the device; a block with device "none" does not."""
        return self.offload_optimizer is not None and self.offload_optimizer.device is not OffloadDeviceEnum.none

    @property
    def offloads_parameters(self) -> bool:
        """Whether parameters leave the device: only sharded ones do, and a block with device "none" moves nothing."""
        away = self.offload_param is not None and self.offload_param.device is not OffloadDeviceEnum.none
        return away and self.stage == ZeroStageEnum.weights

    @property
    def swap_folders(self) -> list[Path]:
        """The folders in which states or parameters live by the offload blocks."""
        blocks = (self.offload_optimizer, self.offload_param if self.offloads_parameters else None)
        on_disk = [block for block in blocks if block is not None and block.device == OffloadDeviceEnum.nvme]
        return [block.nvme_path for block in on_disk if block.nvme_path is not None]

    @field_validator("mics_shard_size", mode="after")
    @classmethod
    def _shard_size(cls, value: int) -> int:
        if value == 0 or value < -1:
            raise ValueError(f"expected a number of ranks above zero, or -1 for off, found {value}")
        return value

    @model_validator(mode="after")
    def _rules(self) -> DeepSpeedZeroConfig:
        problems = []
        stage = int(self.stage)
        if self.legacy_stage1:
            problems.append("legacy_stage1 is true, but that implementation no longer exists; remove the key")
        if not self.compute_grad_norm:
            problems += self._without_norm(stage)
        if self.offload_optimizer is not None and self.offload_optimizer.ratio < 1 and stage != 3:
            problems.append(
                f"offload_optimizer.ratio below 1 ({self.offload_optimizer.ratio}) needs stage 3, found stage {stage}"
            )
        if self.zenflow is not None:
            if not self.offloads_optimizer:
                problems.append(f"zenflow at stage {stage} needs offload_optimizer.device cpu or nvme, found none")
            if self.zenflow.offload and not self.overlap_comm:
                problems.append("zenflow.offload needs overlap_comm, which is off; set overlap_comm to true")
        raise_together(problems)
        return self

    def _without_norm(self, stage: int) -> list[str]:
        """What stands against `compute_grad_norm: false`."""
        problems = []
        if stage not in (1, 2):
            problems.append(f"compute_grad_norm can be false at stage 1 or 2 only, found stage {stage}")
        if self.zenflow is not None:
            problems.append("compute_grad_norm must be true with zenflow, which needs the norm")
        if self.offloads_optimizer:
            problems.append("compute_grad_norm must be true with offload_optimizer, which needs the norm")
        return problems
