"""What a config in Megatron's words says of a layer, looked at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import UsageError

__all__ = ["Settings"]

_NOT_HERE = {
    "apply_layernorm_1p": "norms whose weight is counted from 1",
    "layernorm_zero_centered_gamma": "norms whose weight is counted from 1",
    "fp32_residual_connection": "residuals in float32 beside layers in 16 bits",
    "num_experts": "experts",
    "num_moe_experts": "experts",
    "recompute_granularity": "recomputation inside; wrap the layers in deepspeed.checkpointing.checkpoint",
    "sequence_parallel": "sequences that stay split between split regions",
    "squared_relu": "squared ReLU; give activation_func",
}


@dataclass(frozen=True)
class Settings:
    """Sizes of the whole layer, not of a rank's part."""

    hidden: int
    heads: int
    groups: int
    """Key-value heads."""
    head_dim: int
    inner: int
    eps: float
    drop_scores: float
    drop_hidden: float
    bias: bool
    gated: bool
    activation: Callable[[Tensor], Tensor]
    rms: bool
    residual_of_norm: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, config: Any) -> Settings:
        """Of an object with Megatron's attributes; what is not there is as Megatron has it by default."""

        def told(name: str, default: Any) -> Any:
            value = getattr(config, name, None)
            return default if value is None else value

        for name, what in _NOT_HERE.items():
            if told(name, False):
                raise UsageError(
                    f"Domino: config.{name} is {getattr(config, name)!r}; there is no {what}. Leave it out"
                )
        kind = told("normalization", "LayerNorm")
        if kind not in ("LayerNorm", "RMSNorm"):
            raise UsageError(f"Domino: config.normalization is {kind!r}; expected LayerNorm or RMSNorm")
        hidden, heads = config.hidden_size, config.num_attention_heads
        gated = bool(told("gated_linear_unit", False) or told("swiglu", False))
        return cls(
            hidden=hidden,
            heads=heads,
            groups=told("num_query_groups", heads) if told("group_query_attention", True) else heads,
            head_dim=told("kv_channels", hidden // heads),
            inner=told("ffn_hidden_size", 4 * hidden),
            eps=told("layernorm_epsilon", 1e-5),
            drop_scores=told("attention_dropout", 0.1),
            drop_hidden=told("hidden_dropout", 0.1),
            bias=told("add_bias_linear", True),
            gated=gated,
            activation=told("activation_func", F.silu if gated else F.gelu),
            rms=kind == "RMSNorm",
            residual_of_norm=told("apply_residual_connection_post_layernorm", False),
            dtype=told("params_dtype", torch.get_default_dtype()),
        )

    def norm(self) -> nn.Module:
        """A norm over the hidden size."""
        kind = nn.RMSNorm if self.rms else nn.LayerNorm
        return kind(self.hidden, eps=self.eps, dtype=self.dtype, device=get_accelerator().current_device_name())

    def share(self, ranks: int) -> tuple[int, int, int]:
        """(query heads, key-value heads, inner width) of a rank."""
        for what, count in (("query heads", self.heads), ("key-value heads", self.groups), ("inner width", self.inner)):
            if count % ranks:
                raise UsageError(f"Domino: {count} {what} do not divide by {ranks} tensor-parallel ranks")
        if self.heads % self.groups:
            raise UsageError(f"Domino: {self.heads} query heads are no multiple of {self.groups} key-value heads")
        return self.heads // ranks, self.groups // ranks, self.inner // ranks
