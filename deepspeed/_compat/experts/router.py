"""`TokenChoiceTopKRouter`: tokens choose experts by scores, among all of them or within the best groups."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deepspeed._compat.experts.counts import count_tokens_per_expert
from deepspeed.errors import UsageError

__all__ = ["TokenChoiceTopKRouter"]

_SCORES = ("softmax", "sigmoid")
_GROUP_SCORES = ("top2_sum", "max")
_TINY = 1e-20


class TokenChoiceTopKRouter(nn.Module):
    """A linear gate, scores of its outputs, and each token's `top_k` best experts."""

    def __init__(
        self,
        dim: int,
        num_experts: int,
        num_expert_groups: int | None,
        num_limited_groups: int | None,
        top_k: int,
        score_func: str,
        route_norm: bool,
        route_scale: float,
        gate_bias: bool,
        group_score_func: str = "top2_sum",
    ) -> None:
        """With groups, experts are chosen within the `num_limited_groups` of them that score highest."""
        super().__init__()
        _require(score_func in _SCORES, f"score_func is {score_func!r}; it must be one of {list(_SCORES)}")
        known = group_score_func in _GROUP_SCORES
        _require(known, f"group_score_func is {group_score_func!r}; it must be one of {list(_GROUP_SCORES)}")
        groups, limited = num_expert_groups, num_limited_groups
        _require(
            (groups is None) == (limited is None),
            f"num_expert_groups is {groups} and num_limited_groups is {limited}: give both, or neither",
        )
        eligible = num_experts
        if groups is not None and limited is not None:
            _require(
                num_experts % groups == 0 and 1 <= limited <= groups,
                f"{num_experts} experts do not form {groups} equal groups of which {limited} are chosen",
            )
            eligible = num_experts // groups * limited
            pairs = group_score_func != "top2_sum" or num_experts // groups >= 2
            _require(pairs, f"a group of {num_experts} ÷ {groups} experts has no two best ones: use 'max'")
        _require(1 <= top_k <= eligible, f"top_k is {top_k}, but a token can go to 1 to {eligible} experts")
        self.gate = nn.Linear(dim, num_experts, bias=gate_bias)
        self.num_experts, self.top_k = num_experts, top_k
        self.num_expert_groups, self.num_limited_groups = groups, limited
        self.score_func, self.group_score_func = score_func, group_score_func
        self.route_norm, self.route_scale = route_norm, route_scale

    def forward(self, x: Tensor, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(scores [S, k] in float32, experts [S, k], tokens of each expert) for tokens [S, dim].

        `expert_bias` [experts] changes whom tokens choose, and no score.
        """
        logits = self.gate(x).float()
        scores = logits.softmax(-1) if self.score_func == "softmax" else logits.sigmoid()
        wanted = scores if expert_bias is None else scores + expert_bias
        if self.num_expert_groups is not None:
            wanted = wanted.masked_fill(~self._eligible(wanted), float("-inf"))
        chosen = wanted.topk(self.top_k, dim=-1, sorted=False).indices
        found = scores.gather(-1, chosen)
        if self.route_norm:
            found = found / (found.sum(-1, keepdim=True) + _TINY)
        return found * self.route_scale, chosen, count_tokens_per_expert(chosen, self.num_experts)

    def _eligible(self, wanted: Tensor) -> Tensor:
        """[S, experts]: True for those of the best groups."""
        groups, limited = self.num_expert_groups or 1, self.num_limited_groups or 1
        members = wanted.view(len(wanted), groups, -1)
        best = members.topk(2, dim=-1).values.sum(-1) if self.group_score_func == "top2_sum" else members.amax(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(limited, dim=-1).indices, True)
        return kept.unsqueeze(-1).expand_as(members).reshape(wanted.shape)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise UsageError(otherwise)
