"""The `pipeline`, `tensor_parallel`, `sequence_parallel` and `expert_parallel` sections: a model over several ranks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from .model import (
    Count,
    CountOrAuto,
    DtypeName,
    Lower,
    Names,
    NoEffect,
    NotBuilt,
    Number,
    NumberOrAuto,
    Pattern,
    Patterns,
    PlainName,
    PositiveCount,
    Section,
    key,
    no_effect,
    raise_together,
)

_IN_THE_MODULE = "PipelineModule decides it, by its arguments"
_WHOLE_SLICES = "a rank sends what it has to the rank with the same slice, which needs all of it"
_NO_SEQUENCES = NoEffect(
    "sequence_parallel_size is below 2, so that sequences are not shared out",
    lambda c: (c.sequence_parallel_size or 1) < 2,
)
_BY_STRUCTURE = "experts are recognised by their structure: parameters of the shape [experts, …]"
_OWN_ROUTER = "router and shared experts of a block stay as the model has them"
_MODELS_ROUTER = NotBuilt("a router, or experts, other than the model's own (set it in the model's config)")
_ONE_PASS = "outputs are always weighted and summed in float32 by one pass"
_OF_DEEPEP = "they belong to comm_backend deepep"


class PipelineConfig(Section):
    """Pipeline parallelism; the stages themselves are defined by PipelineModule."""

    schedule: Annotated[Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev"], Lower] | None = key(
        None, "Order of the passes (any case); null is the one that PipelineModule was built for."
    )
    stages: CountOrAuto = no_effect("auto", _IN_THE_MODULE)
    partition: str = no_effect("best", _IN_THE_MODULE)
    seed_layers: bool = no_effect(False, _IN_THE_MODULE)
    activation_checkpoint_interval: Count = key(
        0, "Number of layers per activation checkpoint; above 0 it overrides the module's own value."
    )
    pipe_partitioned: bool = no_effect(True, _WHOLE_SLICES)
    grad_partitioned: bool = no_effect(True, _WHOLE_SLICES)
    use_reentrant: bool | None = key(
        None, "Whether activation checkpointing is the reentrant kind of torch; null means yes."
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

    patterns: Patterns = key([], "Regular expressions matched from the start of <module>.weight.")
    partition_type: Literal["column", "row", "skip"] = key(
        "column", "column splits the output dim, row the input dim, skip leaves the layer whole."
    )
    shape: Annotated[list[int | list[int]] | None, BeforeValidator(_shape)] = key(
        None, "View of a fused weight in which it is split, such as [3, -1] or [[q, k, v], -1]."
    )
    partition_dim: Count | None = key(None, "Dim of that view which is split; null is 0 for column and 1 for row.")
    model_types: list[Annotated[str, Lower]] | None = key(
        None, "Model types (any case) that the rule applies to; null means every model."
    )
    gather_output: bool = key(False, "Whether the output of a column layer is gathered whole.")
    grad_allreduce: bool = key(False, "Whether gradients of a skipped layer are summed over the tensor-parallel ranks.")

    @model_validator(mode="after")
    def _rules(self) -> LayerSpecConfig:
        default = {"column": 0, "row": 1}.get(self.partition_type)
        if self.shape is None and self.partition_dim not in (None, default):
            split = "not split" if default is None else f"split along dim {default} of its weight"
            raise ValueError(
                f"partition_dim is {self.partition_dim}, but a {self.partition_type} layer without shape is {split}. "
                "Give the shape of which it is a dim, or leave partition_dim out"
            )
        if self.shape is None or default is None:
            return self
        dim = default if self.partition_dim is None else self.partition_dim
        if dim >= len(self.shape):
            raise ValueError(f"partition_dim {dim} does not index shape {self.shape}, which has {len(self.shape)} dims")
        for index, size in enumerate(self.shape):
            if isinstance(size, list) and index != dim:
                raise ValueError(f"shape {self.shape} has parts at dim {index}; they must be at partition_dim {dim}")
        return self


class PartitionConfig(Section):
    """Own rules for splitting layers, in order of precedence."""

    use_default_specs: bool = key(True, "Whether the rules of preset_model follow after these; false uses these only.")
    layer_specs: list[LayerSpecConfig] = key([], "The rules; the first that matches a weight wins.")
    strict_mode: bool = key(False, "Whether a layer that no rule matches is an error.")
    lm_head_patterns: Names = key(["lm_head", "embed_out"], "Last parts of the module path that mark the output layer.")
    embedding_partition_dim: Count = no_effect(1, "embeddings are split by vocabulary")
    tp_size: PositiveCount = no_effect(1, "tensor_parallel.autotp_size is the number of ranks")


class TPConfig(Section):
    """The group of ranks that share each layer."""

    tp_size: PositiveCount = key(1, "Number of ranks; 1, or the same as autotp_size.")
    tp_grain_size: PositiveCount = key(1, "Shards are multiples of this many elements.")
    mpu: Any = key(None, "Model-parallel unit, as a Python object; not settable from JSON.")
    tp_group: Any = key(None, "Process group, as a Python object; not settable from JSON.")


class TPTrainingConfig(Section):
    """Tensor parallelism in training (AutoTP)."""

    autotp_size: Count = key(0, "Number of ranks that share each layer; 0 and 1 are off.")
    preset_model: (
        Annotated[Literal["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"], Lower] | None
    ) = key(None, "Model family whose built-in rules are used (any case).")
    partition_config: PartitionConfig | None = key(None, "Own rules for splitting layers; they go before the preset's.")
    tp_overlap_comm: bool = key(
        False,
        "Whether sums over ranks overlap with products: in backward those of input gradients with weight gradients, "
        "in forward those of one half of the tokens with the other half.",
    )
    sequence_parallel: bool = key(
        False,
        "Whether hidden states between split layers are split along the sequence, so that what norms keep for "
        "backward is divided, too. For models of blocks with attention and feed-forward as children.",
    )
    vocab_parallel_lm_head: bool | None = key(
        None, "Whether the output layer is split by vocabulary; null follows the model's own plan."
    )
    vocab_parallel_embedding: bool = key(
        False, "Whether the input embedding is split by vocabulary where it is not tied to the output layer, too."
    )
    vocab_parallel_ce_backend: Literal["torch", "liger"] = key(
        "torch",
        "Implementation of the cross-entropy over a split vocabulary.",
        NotBuilt("Liger's cross-entropy over a split vocabulary", instead='use "torch"'),
    )
    tensor_parallel: TPConfig = key(TPConfig, "The group of ranks that share each layer.", alias="tp")
    dtype: DtypeName = key("fp16", "Dtype that tp_model_init must agree with; it does not change the model.")
    keep_module_on_host: bool = key(
        False, "Whether split weights stay in host memory.", NotBuilt("split layers in host memory")
    )
    replace_with_kernel_inject: bool = no_effect(
        False, "kernels are injected for inference only", alias="kernel_inject"
    )
    injection_policy_tuple: tuple[Any, ...] | None = key(
        None,
        "Layer names of a manual policy, as Python objects; set by the library itself.",
        NotBuilt("manual injection policies"),
    )

    @model_validator(mode="after")
    def _rules(self) -> TPTrainingConfig:
        size = self.tensor_parallel.tp_size
        if size not in (1, self.autotp_size):
            raise ValueError(f"tp.tp_size ({size}) must be 1 or equal autotp_size ({self.autotp_size})")
        return self


class SequenceParallelConfig(Section):
    """What the engine does for a model of Transformers; `sequence_parallel_size` is the number of ranks."""

    attention: Annotated[Literal["auto", "ulysses", "ring"], Lower] | None = key(
        None,
        "Whether ranks exchange heads (ulysses), pass keys on (ring), or what suits the model's heads (auto, also "
        "both); the engine then shares whole sequences out. null leaves all of that to the script.",
        _NO_SEQUENCES,
    )
    ulysses_size: PositiveCount | None = key(
        None,
        "Number of neighbouring ranks that exchange heads, with auto; keys travel between these.",
        _NO_SEQUENCES,
        NoEffect(
            "sequence_parallel.attention is not given, so that the script shares sequences out",
            lambda c: (c.sequence_parallel_size or 1) > 1 and c.sequence_parallel.attention is None,
        ),
    )
    tiled_compute: PositiveCount | None = key(
        None,
        "Tokens of a tile in which MLPs and norms of a model of Transformers are computed; what they need inside "
        "exists for one tile. null computes them whole.",
    )
    tiled_loss: PositiveCount | None = key(
        None,
        "Tokens of a tile in which logits and loss of a causal model of Transformers are computed in training; its "
        "outputs then have no logits. null computes them whole.",
    )


class ExpertParallelConfig(Section):
    """Automatic expert parallelism; the rules between keys are checked when it is enabled."""

    enabled: bool = key(False, "Whether mixture-of-experts layers are found and spread over ranks.")
    autoep_size: PositiveCount = key(1, "Number of ranks that share the experts of a layer; must divide their number.")
    expert_tensor_parallel_size: PositiveCount = key(
        1, "Number of ranks that share one expert: 1, or all tensor-parallel ranks."
    )

    # How the layers are recognised
    preset_model: Literal["mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3"] | None = (
        no_effect(None, _BY_STRUCTURE)
    )
    moe_layer_pattern: Pattern | None = key(None, "Regular expression for the module paths of the layers.")
    router_pattern: PlainName | None = no_effect(None, _OWN_ROUTER)
    expert_pattern: PlainName | None = key(None, "Name of the experts inside a layer; null takes the preset's.")
    expert_w1: PlainName | None = no_effect(None, _BY_STRUCTURE)
    expert_w2: PlainName | None = no_effect(None, _BY_STRUCTURE)
    expert_w3: PlainName | None = no_effect(None, _BY_STRUCTURE)
    num_experts_attr: PlainName | None = no_effect(None, _BY_STRUCTURE)
    top_k_attr: PlainName | None = no_effect(None, _OWN_ROUTER)
    has_shared_experts: bool | None = no_effect(None, _OWN_ROUTER)
    shared_experts_pattern: PlainName | None = no_effect(None, _OWN_ROUTER)
    shared_experts_gate_pattern: PlainName | None = no_effect(None, _OWN_ROUTER)

    # Routing
    top_k: CountOrAuto = key("auto", "Number of experts per token; auto asks the model's config.", _MODELS_ROUTER)
    score_func: Literal["auto", "softmax", "sigmoid"] = key(
        "auto", "Function that turns router outputs into scores; auto takes the preset's.", _MODELS_ROUTER
    )
    score_apply: Literal["auto", "pre", "post"] = key(
        "auto", "Whether scores multiply the input (pre) or the output (post) of the experts.", _MODELS_ROUTER
    )
    route_norm: bool | None = key(
        None, "Whether the scores of the chosen experts are made to sum to 1; null asks the model.", _MODELS_ROUTER
    )
    route_scale: Number = key(1.0, "Factor on the scores.", _MODELS_ROUTER)
    routed_scaling_factor: NumberOrAuto = key(
        "auto", "Factor on the routed output; auto asks the model, then takes route_scale.", _MODELS_ROUTER
    )
    num_expert_groups: PositiveCount | None = key(
        None, "Number of groups that the experts form for routing; null asks the model.", _MODELS_ROUTER
    )
    num_limited_groups: PositiveCount | None = key(
        None, "Number of these groups that a token may use; null asks the model.", _MODELS_ROUTER
    )
    load_balance_coeff: Any = key(
        None, "Must be null: balancing without an auxiliary loss is not supported.", _MODELS_ROUTER
    )

    # Computation
    use_grouped_mm: bool = key(True, "Whether the experts are computed in grouped matrix products.")
    disable_triton_grouped_mm: bool = no_effect(False, "torch's grouped product is the one that there is")
    gate_up_impl: Literal["separate", "fused"] = no_effect(
        "separate", "gate and up are one product where the model keeps them as one"
    )
    expert_activation: Literal["swiglu", "geglu_tanh", "swiglu_clamped", "swiglu_oai"] | None = key(
        None, "Activation between the experts' weights; null takes the preset's.", _MODELS_ROUTER
    )
    combine_impl: Literal["auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm"] = no_effect("auto", _ONE_PASS)
    row_weighting_impl: Literal["auto", "eager", "fused"] = no_effect("auto", _ONE_PASS)

    # Communication
    comm_backend: Literal["comm", "deepep"] = key(
        "comm", "Library that exchanges tokens: our collectives (comm) or DeepEP.", NotBuilt("DeepEP")
    )
    comm_num_sm: PositiveCount = no_effect(12, _OF_DEEPEP)
    comm_qp_margin: Count = no_effect(4, _OF_DEEPEP)
    comm_max_tokens_per_rank: Count = no_effect(0, _OF_DEEPEP)
    async_split_plan: bool = no_effect(False, "numbers of tokens travel as soon as the router has chosen")
    validate_folding_routing: bool = key(
        False,
        "Whether tensor-parallel ranks check that they route alike.",
        NoEffect(
            "tensor_parallel.autotp_size is 1, so that no two ranks have the same tokens",
            lambda c: c.axis_sizes["tp"] == 1,
        ),
    )

    @model_validator(mode="after")
    def _rules(self) -> ExpertParallelConfig:
        if self.enabled:
            raise_together([*self._size_problems(), *self._kernel_problems()])
        return self

    def _size_problems(self) -> list[str]:
        problems = []
        if self.load_balance_coeff is not None:
            problems.append(f"load_balance_coeff is not supported and must be null, found {self.load_balance_coeff!r}")
        groups, limited = self.num_expert_groups, self.num_limited_groups
        if (groups is None) != (limited is None):
            problems.append(
                f"num_expert_groups ({groups}) and num_limited_groups ({limited}) belong together; give both or none"
            )
        elif groups is not None and limited is not None and limited > groups:
            problems.append(f"num_limited_groups ({limited}) exceeds num_expert_groups ({groups})")
        return problems

    def _kernel_problems(self) -> list[str]:
        problems = []
        if self.gate_up_impl == "fused" and not self.use_grouped_mm:
            problems.append('gate_up_impl "fused" needs use_grouped_mm, which is false')
        if self.combine_impl == "fused_weighted_sum" and self.score_apply == "pre":
            problems.append('combine_impl "fused_weighted_sum" needs score_apply "post", found "pre"')
        if self.row_weighting_impl == "fused" and (self.comm_backend != "deepep" or self.autoep_size < 2):
            problems.append(
                'row_weighting_impl "fused" needs comm_backend "deepep" and autoep_size above 1, found '
                f'"{self.comm_backend}" and {self.autoep_size}'
            )
        return problems
