"""The `zero_optimization` section: what is sharded, in which bucket sizes, and what is offloaded."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, field_validator, model_validator

from .leaf_module import DeepSpeedZeroLeafModuleConfig
from .model import Count, Elements, PositiveCount, PositiveElements, Section, Share
from .offload import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig, OffloadDeviceEnum
from .values import Whole, raise_together
from .zenflow import ZenFlowConfig

__all__ = ["DeepSpeedZeroConfig", "LoCoConfig", "ZeroStageEnum"]


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

    err_beta: Share = Field(description="Share of the old compression error that is carried on (0 to 1).")
    reset_T: PositiveCount = Field(description="Number of steps after which the kept error is forgotten.")


class DeepSpeedZeroConfig(Section):
    """ZeRO: shards of optimizer state, gradients and parameters instead of copies on every rank."""

    renamed_under: ClassVar[str | None] = "zero_optimization"

    stage: Annotated[ZeroStageEnum, BeforeValidator(_stage)] = Field(
        ZeroStageEnum.disabled,
        description="What is sharded over the data-parallel ranks: 0 nothing, 1 optimizer state, 2 gradients too, "
        "3 parameters too.",
    )

    # Gradients and their reduction
    overlap_comm: bool | None = Field(
        None,
        description="Whether gradients travel while backward goes on; null means yes. False waits for each "
        "bucket, at stage 3 until backward is over.",
    )
    reduce_scatter: bool = Field(
        True, description="Whether each gradient is reduced to its owner only, instead of to every rank."
    )
    reduce_bucket_size: PositiveElements = Field(
        500_000_000,
        description="Number of gradient elements reduced in one collective; if absent, by the ranks.",
    )
    contiguous_gradients: bool = Field(
        True,
        description="Whether gradients are packed into flat buckets; false sends each by itself.",
    )
    round_robin_gradients: bool = Field(
        False, description="Whether gradient ownership alternates between ranks (stages 1 and 2)."
    )
    use_multi_rank_bucket_allreduce: bool = Field(
        True, description="Whether the slices of several ranks share one all-reduce (stages 1 and 2)."
    )
    compute_grad_norm: bool = Field(
        True, description="Whether the global gradient norm is computed; false needs stage 1 or 2 and no clipping."
    )
    ignore_unused_parameters: bool = Field(
        True, description="Whether a trained parameter without a gradient on any rank is accepted."
    )
    parameter_alignment: bool = Field(
        False, description="Whether each parameter starts at a 16-byte boundary of its flat buffer (stages 1 and 2)."
    )

    # Parameters
    allgather_bucket_size: Elements = Field(
        500_000_000, description="Number of updated elements gathered in one collective (stages 1 and 2)."
    )
    allgather_partitions: bool = Field(
        True, description="No effect: updated parameters are always gathered in buckets; accepted for old configs."
    )
    sub_group_size: Elements = Field(
        1_000_000_000, description="Number of elements that the optimizer updates at a time (stage 3)."
    )
    prefetch_bucket_size: Elements = Field(
        50_000_000,
        alias="stage3_prefetch_bucket_size",
        description="Number of parameter elements gathered ahead of their use (stage 3).",
    )
    param_persistence_threshold: Elements = Field(
        100_000,
        alias="stage3_param_persistence_threshold",
        description="Parameters of at most this many elements stay whole on every rank (stage 3).",
    )
    model_persistence_threshold: Elements = Field(
        2**63 - 1,
        alias="stage3_model_persistence_threshold",
        description="Limit on the sum of elements that stay whole for that reason (stage 3).",
    )
    max_live_parameters: Elements = Field(
        1_000_000_000,
        alias="stage3_max_live_parameters",
        description="Number of parameter elements that may be whole at a time (stage 3).",
    )
    max_reuse_distance: Elements = Field(
        1_000_000_000,
        alias="stage3_max_reuse_distance",
        description="A parameter used again within this many elements is not released in between; from forward "
        "to backward only where this key is given (stage 3).",
    )
    gather_16bit_weights_on_model_save: bool = Field(
        False,
        alias="stage3_gather_16bit_weights_on_model_save",
        description="Whether clients may gather whole 16-bit weights to save the model; `save_16bit_model` does "
        "so unless this is set to false, which makes it an error (stage 3).",
    )
    module_granularity_threshold: Whole = Field(
        0,
        alias="stage3_module_granularity_threshold",
        description="Modules with fewer parameter elements per submodule than this are gathered whole; 0 is off "
        "(stage 3).",
    )
    use_all_reduce_for_fetch_params: bool = Field(
        False,
        alias="stage3_use_all_reduce_for_fetch_params",
        description="Whether parameters are gathered by an all-reduce instead of an all-gather (stage 3).",
    )
    allgather_sequential: bool = Field(
        False,
        alias="stage3_allgather_sequential",
        description="Whether parameters are gathered one by one, without the copy through a bucket (stage 3).",
    )
    leaf_module: DeepSpeedZeroLeafModuleConfig = Field(
        default_factory=DeepSpeedZeroLeafModuleConfig,
        description="Modules whose whole subtree stage 3 gathers as one unit.",
    )
    memory_efficient_linear: bool = Field(
        True, description="No effect: no layer keeps a whole weight for backward at stage 3; accepted for old configs."
    )
    override_module_apply: bool = Field(
        True, description="Whether Module.apply gathers the parameters that it visits (stage 3)."
    )

    # Offload
    offload_param: DeepSpeedZeroOffloadParamConfig | None = Field(
        None, description="Where parameter shards live between uses (stage 3)."
    )
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = Field(
        None, description="Where optimizer state lives and is updated (stages 1-3)."
    )
    zenflow: ZenFlowConfig | None = Field(
        None, description="Deferred CPU updates for the less important gradients; the block switches it on."
    )
    save_muon_momentum_buffer_in_memory: bool = Field(
        False, description="Whether Muon's momentum stays in memory when other state is on NVMe (stage 3)."
    )

    # ZeRO++ and MiCS
    zero_hpz_partition_size: Count = Field(
        1,
        description="Number of neighbouring ranks that share a second copy of the weights for backward; 0 and 1 are "
        "off (stage 3).",
    )
    zero_quantized_weights: bool = Field(
        False, description="Whether weights are quantised before they are gathered (stage 3)."
    )
    zero_quantized_nontrainable_weights: bool = Field(
        False, description="Whether frozen weights are stored quantised (stage 3, fp16)."
    )
    zero_quantized_gradients: bool = Field(
        False, description="Whether gradients are reduced in a quantised two-hop exchange (stage 3)."
    )
    zeropp_loco_param: LoCoConfig | None = Field(
        None, description="Error feedback for zero_quantized_gradients; null is off."
    )
    mics_shard_size: Whole = Field(
        -1, description="Number of ranks that share one set of shards (MiCS); -1 means all ranks (stage 3)."
    )
    mics_hierarchical_params_gather: bool = Field(
        False, description="Whether MiCS gathers in two steps, between nodes and then inside the node (stage 3)."
    )

    # Checkpoints and checks
    load_from_fp32_weights: bool = Field(
        True, description="Whether a checkpoint restores master weights from their fp32 copies."
    )
    elastic_checkpoint: bool = Field(
        False, description="No effect: every checkpoint loads at any world size; accepted for old configs."
    )
    pipeline_loading_checkpoint: bool = Field(
        False, description="No effect: a rank reads only its own part of the files; accepted for old configs."
    )
    log_trace_cache_warnings: bool = Field(
        False, description="Whether a change in the order of parameter use is logged (stage 3)."
    )
    enable_sanity_checks: bool = Field(False, description="Whether internal consistency is checked at run time.")
    legacy_stage1: bool = Field(
        False, description="The first implementation of stage 1, which no longer exists; must be false."
    )

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
        if self.zero_quantized_gradients and not self.reduce_scatter:
            problems.append("zero_quantized_gradients needs reduce_scatter, which is false")
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
