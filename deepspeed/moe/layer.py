"""`MoE`: a mixture-of-experts layer whose experts may be spread over ranks."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from deepspeed.errors import UsageError
from deepspeed.log import log_dist, logger
from deepspeed.moe.experts import Experts
from deepspeed.moe.sharded_moe import MOELayer, TopKGate
from deepspeed.parallel import ExpertGroups, ParallelLayout
from deepspeed.parallel.mpu import current_layout

__all__ = ["MoE", "meet"]

_POLICIES = (None, "None", "Jitter", "RSample")


class MoE(nn.Module):
    """Sends each token to k of `num_experts` experts; each of `ep_size` ranks holds num_experts / ep_size of them."""

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        """`expert` takes and returns [tokens, hidden_size]; it is copied.

        `use_rts` draws the tokens that a full expert keeps; `use_residual` adds one expert that sees every token.
        """
        super().__init__()
        if ep_size < 1 or num_experts % ep_size:
            raise UsageError(
                f"num_experts is {num_experts} and ep_size is {ep_size}: each of the ep_size ranks holds as many "
                "experts, so ep_size must divide num_experts"
            )
        if noisy_gate_policy not in _POLICIES:
            raise UsageError(f"noisy_gate_policy is {noisy_gate_policy!r}; it must be one of {list(_POLICIES)}")
        if use_tutel:
            logger.info("MoE: use_tutel changes nothing, tokens are moved by sorting them anyway")
        self.use_residual = use_residual
        self.enable_expert_tensor_parallelism = enable_expert_tensor_parallelism
        self.ep_size = ep_size
        self.expert_group_name = f"ep_size_{ep_size}"
        self.num_experts = num_experts
        self.num_local_experts = num_experts // ep_size
        gate = TopKGate(
            hidden_size,
            num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            None,
            top2_2nd_expert_sampling,
        )
        experts = Experts(expert, self.num_local_experts, self.expert_group_name)
        self.deepspeed_moe = MOELayer(
            gate, experts, self.expert_group_name, self.ep_size, self.num_local_experts, use_tutel=use_tutel
        )
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)  # the weights of experts and residual

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Find the ranks of the experts in the current layout; the engine does this by itself."""
        self.join(current_layout.get(), data_first=use_data_before_expert_parallel_)

    def join(self, layout: ParallelLayout, *, data_first: bool = False) -> ExpertGroups:
        """Take the ranks of the experts from a layout; all ranks call this for all layers, in the same order."""
        tensor = layout.tensor
        folds = tensor.size > 1 and not self.enable_expert_tensor_parallelism
        experts = layout.experts(self.ep_size, data_first=data_first, fold_tp=folds)
        meet(experts, self.expert_group_name)
        drops = self.deepspeed_moe.gate.drop_tokens and experts.ep.size > 1
        self.deepspeed_moe.join(experts.ep, tensor if folds else None, experts.hosts if drops else None)
        self.deepspeed_moe.gate.ep_group = self.deepspeed_moe.ep_group
        return experts

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(output, auxiliary loss, tokens per expert); `used_token` [S] leaves out those that are 0 there (top-1)."""
        if not self.use_residual:
            output: Tensor = self.deepspeed_moe(hidden_states, used_token)
            return output, self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts
        seen: list[Tensor] = []

        def residual() -> None:
            beside = self.mlp(hidden_states)
            seen.append(beside[0] if isinstance(beside, tuple) else beside)

        output = self.deepspeed_moe(hidden_states, used_token, beside=residual)
        shares = functional.softmax(self.coefficient(hidden_states), dim=-1)
        output = output * shares[..., 0:1] + seen[0] * shares[..., 1:]
        return output, self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts


def meet(experts: ExpertGroups, name: str) -> ExpertGroups:
    """Make the groups of ranks, which all of them do in the same order, and let scripts find them by name."""
    for axis in (experts.ep, experts.edp):
        _ = axis.group if axis.size > 1 else None
    if experts.ep.size > 1 and experts.ep.nodes is None and experts.ep.meet_nodes():
        inter, intra = experts.ep.nodes or (experts.ep, experts.ep)
        log_dist(
            f"experts on {experts.ep.size} ranks of {inter.size} nodes: tokens travel in two hops, to {intra.size} "
            "places of a node and then between nodes"
        )
    current_layout.experts[name] = experts
    return experts
