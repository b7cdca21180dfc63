"""The `expert_parallel` section: mixture-of-experts layers of a model, found and spread over ranks (AutoEP)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from .model import Count, PositiveCount, Section
from .values import CountOrAuto, Number, NumberOrAuto, Pattern, PlainName, raise_together

__all__ = ["ExpertParallelConfig"]


class ExpertParallelConfig(Section):
    """Automatic expert parallelism; the rules between keys are checked when it is enabled."""

    enabled: bool = Field(False, description="Whether mixture-of-experts layers are found and spread over ranks.")
    autoep_size: PositiveCount = Field(
        1, description="Number of ranks that share the experts of a layer; must divide their number."
    )
    expert_tensor_parallel_size: PositiveCount = Field(
        1, description="Number of ranks that share one expert: 1, or all tensor-parallel ranks."
    )

    # How the layers are recognised
    preset_model: Literal["mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3"] | None = (
        Field(None, description="Model family that names the parts; null goes by the model's type.")
    )
    moe_layer_pattern: Pattern | None = Field(
        None, description="Regular expression for the module paths of the layers."
    )
    router_pattern: PlainName | None = Field(
        None, description="Name of the router inside a layer; null takes the preset's."
    )
    expert_pattern: PlainName | None = Field(
        None, description="Name of the experts inside a layer; null takes the preset's."
    )
    expert_w1: PlainName | None = Field(
        None, description="Name of the experts' first weight (gate); null takes the preset's."
    )
    expert_w2: PlainName | None = Field(
        None, description="Name of the experts' second weight (down); null takes the preset's."
    )
    expert_w3: PlainName | None = Field(
        None,
        description="Name of the experts' third weight (up); left out it is the preset's, an explicit null says "
        "that it is fused into the first.",
    )
    num_experts_attr: PlainName | None = Field(
        None, description="Attribute of the model's config with the number of experts; null takes the preset's."
    )
    top_k_attr: PlainName | None = Field(
        None, description="Attribute of the model's config with the experts per token; null takes the preset's."
    )
    has_shared_experts: bool | None = Field(
        None, description="Whether the layers have experts that see every token; null takes the preset's."
    )
    shared_experts_pattern: PlainName | None = Field(
        None, description="Name of the shared experts inside a layer; null takes the preset's."
    )
    shared_experts_gate_pattern: PlainName | None = Field(
        None, description="Name of the gate of the shared experts; null takes the preset's."
    )

    # Routing
    top_k: CountOrAuto = Field("auto", description="Number of experts per token; auto asks the model's config.")
    score_func: Literal["auto", "softmax", "sigmoid"] = Field(
        "auto", description="Function that turns router outputs into scores; auto takes the preset's."
    )
    score_apply: Literal["auto", "pre", "post"] = Field(
        "auto", description="Whether scores multiply the input (pre) or the output (post) of the experts."
    )
    route_norm: bool | None = Field(
        None, description="Whether the scores of the chosen experts are made to sum to 1; null asks the model."
    )
    route_scale: Number = Field(1.0, description="Factor on the scores.")
    routed_scaling_factor: NumberOrAuto = Field(
        "auto", description="Factor on the routed output; auto asks the model, then takes route_scale."
    )
    num_expert_groups: PositiveCount | None = Field(
        None, description="Number of groups that the experts form for routing; null asks the model."
    )
    num_limited_groups: PositiveCount | None = Field(
        None, description="Number of these groups that a token may use; null asks the model."
    )
    load_balance_coeff: Any = Field(
        None, description="Must be null: balancing without an auxiliary loss is not supported."
    )

    # Computation
    use_grouped_mm: bool = Field(True, description="Whether the experts are computed in grouped matrix products.")
    disable_triton_grouped_mm: bool = Field(
        False, description="Whether torch's grouped matrix product is used instead of the Triton one."
    )
    gate_up_impl: Literal["separate", "fused"] = Field(
        "separate", description="Whether gate and up are two products or one; fused needs use_grouped_mm."
    )
    expert_activation: Literal["swiglu", "geglu_tanh", "swiglu_clamped", "swiglu_oai"] | None = Field(
        None, description="Activation between the experts' weights; null takes the preset's."
    )
    combine_impl: Literal["auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm"] = Field(
        "auto", description="How the outputs of a token's experts are added up."
    )
    row_weighting_impl: Literal["auto", "eager", "fused"] = Field(
        "auto", description="How scores multiply rows; fused needs comm_backend deepep and autoep_size above 1."
    )

    # Communication
    comm_backend: Literal["comm", "deepep"] = Field(
        "comm", description="Library that exchanges tokens: our collectives (comm) or DeepEP."
    )
    comm_num_sm: PositiveCount = Field(12, description="Number of GPU multiprocessors that DeepEP may use.")
    comm_qp_margin: Count = Field(4, description="Number of spare queue pairs for DeepEP.")
    comm_max_tokens_per_rank: Count = Field(
        0, description="Largest number of tokens that a rank sends; DeepEP needs it above 0."
    )
    async_split_plan: bool = Field(False, description="Whether the exchange of token counts overlaps with computation.")
    validate_folding_routing: bool = Field(
        False, description="Whether tensor-parallel ranks check that they route alike."
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
        spread_by_deepep = self.comm_backend == "deepep" and self.autoep_size > 1
        if self.gate_up_impl == "fused" and not self.use_grouped_mm:
            problems.append('gate_up_impl "fused" needs use_grouped_mm, which is false')
        if self.combine_impl == "fused_weighted_sum":
            if spread_by_deepep:
                problems.append('combine_impl "fused_weighted_sum" does not work with comm_backend "deepep"')
            if self.score_apply == "pre":
                problems.append('combine_impl "fused_weighted_sum" needs score_apply "post", found "pre"')
        if self.row_weighting_impl == "fused" and not spread_by_deepep:
            problems.append(
                'row_weighting_impl "fused" needs comm_backend "deepep" and autoep_size above 1, found '
                f'"{self.comm_backend}" and {self.autoep_size}'
            )
        if self.comm_backend == "deepep" and self.comm_max_tokens_per_rank == 0:
            problems.append('comm_max_tokens_per_rank must be above 0 with comm_backend "deepep", found 0')
        return problems
