"""The `pipeline` and `tensor_parallel` sections: how a model is split over ranks by layers and inside layers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from .model import Count, PositiveCount, Section
from .values import CountOrAuto, DtypeName, Lower, Names, Patterns, raise_together

__all__ = ["LayerSpecConfig", "PartitionConfig", "PipelineConfig", "TPConfig", "TPTrainingConfig"]


class PipelineConfig(Section):
    """Pipeline parallelism; the stages themselves are defined by PipelineModule."""

    schedule: Annotated[Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev"], Lower] | None = Field(
        None, description="Order of the passes (any case); null is the one that PipelineModule was built for."
    )
    stages: CountOrAuto = Field("auto", description="No effect: PipelineModule(num_stages=...) decides.")
    partition: str = Field("best", description="No effect: PipelineModule(partition_method=...) decides.")
    seed_layers: bool = Field(False, description="No effect: PipelineModule(seed_layers=...) decides.")
    activation_checkpoint_interval: Count = Field(
        0, description="Number of layers per activation checkpoint; above 0 it overrides the module's own value."
    )
    pipe_partitioned: bool = Field(
        True, description="Whether activations between stages are sent in shards by the model-parallel ranks."
    )
    grad_partitioned: bool = Field(
        True, description="Whether gradients between stages are sent in shards by the model-parallel ranks."
    )
    use_reentrant: bool | None = Field(
        None, description="Whether activation checkpointing is the reentrant kind of torch; null means yes."
    )


def _shape(value: Any) -> Any:
    """Sizes above zero or -1; one of them may be a list of sizes, for weights fused from unequal parts."""
    if value is None:
        return None
    expected = "expected a list of sizes above zero or -1, of which one may itself be a list of sizes above zero"
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"{expected}; found {value!r}")
    nested = [item for item in value if isinstance(item, (list, tuple))]
    plain = [item for item in value if not isinstance(item, (list, tuple))]
    inner = [size for item in nested for size in item]
    if any(not item for item in nested) or len(nested) > 1:
        raise ValueError(f"{expected}; found {value!r}")
    if any(not _is_size(size) for size in inner) or any(size != -1 and not _is_size(size) for size in plain):
        raise ValueError(f"{expected}; found {value!r}")
    return [list(item) if isinstance(item, tuple) else item for item in value]


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


class LayerSpecConfig(Section):
    """One rule: which weights it matches, and how they are split."""

    patterns: Patterns = Field([], description="Regular expressions matched from the start of <module>.weight.")
    partition_type: Literal["column", "row", "skip"] = Field(
        "column", description="column splits the output dim, row the input dim, skip leaves the layer whole."
    )
    shape: Annotated[list[int | list[int]] | None, BeforeValidator(_shape)] = Field(
        None, description="View of a fused weight in which it is split, such as [3, -1] or [[q, k, v], -1]."
    )
    partition_dim: Count | None = Field(
        None, description="Dim of that view which is split; null is 0 for column and 1 for row."
    )
    model_types: list[Annotated[str, Lower]] | None = Field(
        None, description="Model types (any case) that the rule applies to; null means every model."
    )
    gather_output: bool = Field(False, description="Whether the output of a column layer is gathered whole.")
    grad_allreduce: bool = Field(
        False, description="Whether gradients of a skipped layer are summed over the tensor-parallel ranks."
    )

    @model_validator(mode="after")
    def _rules(self) -> LayerSpecConfig:
        if self.shape is None or self.partition_type == "skip":
            return self
        default = 1 if self.partition_type == "row" else 0
        dim = default if self.partition_dim is None else self.partition_dim
        if dim >= len(self.shape):
            raise ValueError(f"partition_dim {dim} does not index shape {self.shape}, which has {len(self.shape)} dims")
        for index, size in enumerate(self.shape):
            if isinstance(size, list) and index != dim:
                raise ValueError(f"shape {self.shape} has parts at dim {index}; they must be at partition_dim {dim}")
        return self


class PartitionConfig(Section):
    """Own rules for splitting layers, in order of precedence."""

    use_default_specs: bool = Field(
        True, description="Whether the rules of preset_model follow after these; false uses these only."
    )
    layer_specs: list[LayerSpecConfig] = Field([], description="The rules; the first that matches a weight wins.")
    strict_mode: bool = Field(False, description="Whether a layer that no rule matches is an error.")
    lm_head_patterns: Names = Field(
        ["lm_head", "embed_out"], description="Last parts of the module path that mark the output layer."
    )
    embedding_partition_dim: Count = Field(
        1, description="No effect: embeddings are split as their rule says; accepted for old configs."
    )
    tp_size: PositiveCount = Field(1, description="No effect: autotp_size is the number of ranks.")


class TPConfig(Section):
    """The group of ranks that share each layer."""

    tp_size: PositiveCount = Field(1, description="Number of ranks; 1, or the same as autotp_size.")
    tp_grain_size: PositiveCount = Field(1, description="Shards are multiples of this many elements.")
    mpu: Any = Field(None, description="Model-parallel unit, as a Python object; not settable from JSON.")
    tp_group: Any = Field(None, description="Process group, as a Python object; not settable from JSON.")


class TPTrainingConfig(Section):
    """Tensor parallelism in training (AutoTP)."""

    autotp_size: Count = Field(0, description="Number of ranks that share each layer; 0 and 1 are off.")
    preset_model: (
        Annotated[Literal["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"], Lower] | None
    ) = Field(None, description="Model family whose built-in rules are used (any case).")
    partition_config: PartitionConfig | None = Field(
        None, description="Own rules for splitting layers; they go before the preset's."
    )
    tp_overlap_comm: bool = Field(
        False,
        description="Whether sums over ranks run beside products: in backward those of input gradients beside weight "
        "gradients, in forward those of one half of the tokens beside the other half.",
    )
    sequence_parallel: bool = Field(
        False,
        description="Whether hidden states between split layers are split along the sequence, so that what norms keep "
        "for backward is divided, too. For models of blocks with attention and feed-forward as children.",
    )
    vocab_parallel_lm_head: bool | None = Field(
        None, description="Whether the output layer is split by vocabulary; null follows the model's own plan."
    )
    vocab_parallel_embedding: bool = Field(
        False,
        description="Whether the input embedding is split by vocabulary where it is not tied to the output layer, too.",
    )
    vocab_parallel_ce_backend: Literal["torch", "liger"] = Field(
        "torch", description="Implementation of the cross-entropy over a split vocabulary."
    )
    tensor_parallel: TPConfig = Field(
        default_factory=TPConfig, alias="tp", description="The group of ranks that share each layer."
    )
    dtype: DtypeName = Field(
        "fp16", description="Dtype that tp_model_init must agree with; it does not change the model."
    )
    keep_module_on_host: bool = Field(False, description="Whether split weights stay in host memory.")
    replace_with_kernel_inject: bool = Field(
        False,
        alias="kernel_inject",
        description="No effect in training: fused kernels are injected for inference only.",
    )
    injection_policy_tuple: tuple[Any, ...] | None = Field(
        None, description="Layer names of a manual policy, as Python objects; set by the library itself."
    )

    @model_validator(mode="after")
    def _rules(self) -> TPTrainingConfig:
        problems = []
        if self.tensor_parallel.tp_size not in (1, self.autotp_size):
            problems.append(
                f"tp.tp_size ({self.tensor_parallel.tp_size}) must be 1 or equal autotp_size ({self.autotp_size})"
            )
        if self.vocab_parallel_ce_backend == "liger" and self.vocab_parallel_lm_head is False:
            problems.append('vocab_parallel_ce_backend "liger" needs vocab_parallel_lm_head, which is false')
        raise_together(problems)
        return self
