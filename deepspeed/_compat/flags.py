"""`set_optimizer_flags`, marks on parameters that tell Muon which of them are matrices; and `HAS_TRITON`."""

from __future__ import annotations

from torch import nn

from deepspeed.config import DeepSpeedConfig
from deepspeed.ops.capability import has_triton

__all__ = ["HAS_TRITON", "set_optimizer_flags"]

HAS_TRITON: bool = has_triton.holds

_NOT_MATRICES = ("embed", "lm_head")


def set_optimizer_flags(config_class: DeepSpeedConfig, model: nn.Module) -> None:
    """With Muon, give every parameter `use_muon`: True for what has two dims or more and is no embedding or head."""
    if (config_class.optimizer_name or "").lower() != "muon":
        return
    for name, param in model.named_parameters():
        dims = len(getattr(param, "ds_shape", param.shape))  # a sharded parameter has no dims of its own
        param.use_muon = dims >= 2 and not any(part in name.lower() for part in _NOT_MATRICES)  # type: ignore[attr-defined]
