"""`GroupedExperts`: gated feed-forward experts in stacked weights, and the activations that they may have."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed.errors import UsageError
from deepspeed.ops.grouped import Groups, grouped_linear
from deepspeed.ops.model.gated import ACTIVATIONS, gated, halves

__all__ = [
    "ExpertActivation",
    "GroupedExperts",
    "apply_expert_activation",
    "apply_packed_expert_activation",
    "get_expert_activation",
    "register_expert_activation",
]

Gating = Callable[[Tensor, Tensor, float, float], Tensor]
"""(gate, up, alpha, limit) → what the down projection is given."""


@dataclass(frozen=True)
class ExpertActivation:
    """What is between the products of an expert."""

    fn: Gating
    fused_fn: Gating | None = None
    """The same in fewer kernels."""
    uses_alpha: bool = False
    uses_limit: bool = False
    gate_fn: Callable[[Tensor], Tensor] | None = None
    """Where `fn` is gate_fn(gate) · up."""

    @property
    def kind(self) -> str | None:
        """What the kernels for gate and up call it; None if they do not know it."""
        return next((kind for kind, known in ACTIVATIONS.items() if known is self.gate_fn), None)


def _by_kind(kind: str) -> ExpertActivation:
    gate_fn = ACTIVATIONS[kind]
    return ExpertActivation(
        fn=lambda gate, up, alpha, limit: gate_fn(gate) * up,
        fused_fn=lambda gate, up, alpha, limit: gated(gate, up, kind),
        gate_fn=gate_fn,
    )


def _clamped(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    return functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def _shifted(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """As gpt-oss has it."""
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1)


_activations: dict[str, ExpertActivation] = {
    "swiglu": _by_kind("silu"),
    "geglu_tanh": _by_kind("gelu_tanh"),
    "swiglu_clamped": ExpertActivation(_clamped, uses_limit=True),
    "swiglu_oai": ExpertActivation(_shifted, uses_alpha=True, uses_limit=True),
}


def register_expert_activation(
    name: str,
    fn: Gating,
    *,
    fused_fn: Gating | None = None,
    uses_alpha: bool = False,
    uses_limit: bool = False,
    gate_fn: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Let experts have an activation of this name."""
    made = ExpertActivation(fn, fused_fn, uses_alpha, uses_limit, gate_fn)
    if _activations.get(name, made) != made:
        raise UsageError(f"an activation {name!r} is known already, and it is another one; choose another name")
    _activations[name] = made


def get_expert_activation(name: str) -> ExpertActivation:
    """The activation of that name."""
    if name not in _activations:
        raise UsageError(
            f"no activation of experts is called {name!r}; known are {sorted(_activations)}, and "
            "register_expert_activation adds one"
        )
    return _activations[name]


def apply_expert_activation(
    gate: Tensor,
    up: Tensor,
    activation: str = "swiglu",
    alpha: float = 1.702,
    limit: float = 7.0,
    fused: bool = True,
) -> Tensor:
    """What the down projection is given; `fused` computes in float32 and rounds once, where a kernel knows how."""
    known = get_expert_activation(activation)
    fn = known.fused_fn if fused and known.fused_fn is not None else known.fn
    return fn(gate, up, alpha, limit)


def apply_packed_expert_activation(
    gate_up: Tensor, activation: str = "swiglu", alpha: float = 1.702, limit: float = 7.0, fused: bool = True
) -> Tensor:
    """The same for gate and up side by side in the last dim."""
    kind = get_expert_activation(activation).kind
    if fused and kind is not None:
        return halves(gate_up, kind)
    gate, up = gate_up.chunk(2, -1)
    return apply_expert_activation(gate, up, activation, alpha, limit, fused)


class GroupedExperts(nn.Module):
    """Experts whose rows lie one behind the other: w2 · act(w1 · x, w3 · x), each with weights of its own."""

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        use_grouped_mm: bool = True,
        disable_triton_grouped_mm: bool = False,
        activation: str = "swiglu",
        activation_alpha: float = 1.702,
        activation_limit: float = 7.0,
        gate_up_impl: str = "separate",
    ) -> None:
        """`use_grouped_mm` computes all experts at once, else one by one; `gate_up_impl` "fused" makes gate and up one.

        Grouped products are torch's here, so that there is no Triton one to disable.
        """
        super().__init__()
        get_expert_activation(activation)
        if gate_up_impl not in ("separate", "fused"):
            raise UsageError(f"gate_up_impl is {gate_up_impl!r}; it must be 'separate' or 'fused'")
        if gate_up_impl == "fused" and not use_grouped_mm:
            raise UsageError("gate_up_impl 'fused' is one grouped product, and use_grouped_mm is False")
        self.num_experts = num_experts
        self.use_grouped_mm = use_grouped_mm
        self.activation, self.activation_alpha, self.activation_limit = activation, activation_alpha, activation_limit
        self.gate_up_impl = gate_up_impl
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw weights as those of linear layers are drawn."""
        for weight in (self.w1, self.w2, self.w3):
            bound = 1 / math.sqrt(weight.shape[2])
            weight.uniform_(-bound, bound)

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """[rows, dim]: the first expert computes so many rows, and so on; rows behind the last become 0."""
        if num_tokens_per_expert.numel() != self.num_experts:
            raise UsageError(
                f"num_tokens_per_expert has {num_tokens_per_expert.numel()} numbers, but there are {self.num_experts} "
                "experts; give one number for each"
            )
        if not self.use_grouped_mm:
            return self._one_by_one(x, num_tokens_per_expert.tolist())
        counts = num_tokens_per_expert.reshape(-1)
        if x.device.type == "cpu" and int(counts.sum()) == len(x):
            return self._at_once(x, Groups.of(counts))
        ends = counts.cumsum(0).to(torch.int32)
        behind = (torch.arange(len(x), device=x.device) >= ends[-1]).unsqueeze(1)
        ends[-1] = len(x)  # no kernel leaves a row as it finds it
        out = self._at_once(x.masked_fill(behind, 0), Groups(self.num_experts, ends=ends))
        return out.masked_fill(behind, 0)

    def _at_once(self, x: Tensor, groups: Groups) -> Tensor:
        if self.gate_up_impl == "fused":
            both = grouped_linear(x, torch.cat((self.w1, self.w3), 1), groups)
            inner = apply_packed_expert_activation(both, *self._activation)
        else:
            gate, up = grouped_linear(x, self.w1, groups), grouped_linear(x, self.w3, groups)
            inner = apply_expert_activation(gate, up, *self._activation)
        return grouped_linear(inner, self.w2, groups)

    @property
    def _activation(self) -> tuple[str, float, float]:
        return self.activation, self.activation_alpha, self.activation_limit

    def _one_by_one(self, x: Tensor, sizes: list[int]) -> Tensor:
        rest = len(x) - sum(sizes)
        parts = []
        for part, w1, w2, w3 in zip(x.split([*sizes, rest]), self.w1, self.w2, self.w3, strict=False):
            gate, up = functional.linear(part, w1), functional.linear(part, w3)
            parts.append(functional.linear(apply_expert_activation(gate, up, *self._activation), w2))
        return torch.cat((*parts, x.new_zeros(rest, x.shape[1])))
