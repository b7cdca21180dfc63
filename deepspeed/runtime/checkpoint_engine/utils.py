"""`create_checkpoint_engine`: the one that a config asks for."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

__all__ = ["create_checkpoint_engine"]


def create_checkpoint_engine(
    config_params: Any, groups: Any, zero_stage: int, has_moe_layers: bool, optimize_dp_state: bool
) -> CheckpointEngine:
    """A `TorchCheckpointEngine` for every config: what `checkpoint.writer` asks for is done below it."""
    return TorchCheckpointEngine(config_params)
