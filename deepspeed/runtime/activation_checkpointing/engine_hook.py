"""What the config section says of checkpointed layers of Transformers, around an engine's forward."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from deepspeed.config.activation import ActivationCheckpointingConfig
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.runtime.activation_checkpointing.layer_marker import layer_class
from deepspeed.runtime.activation_checkpointing.offload_activations import CheckpointHiddenStatesOffload

__all__ = ["keep_hidden_states"]

Forward = Callable[..., Any]


def keep_hidden_states(section: ActivationCheckpointingConfig, module: nn.Module, forward: Forward) -> Forward:
    """`forward` in which the inputs of checkpointed layers wait as the section says; itself where it says nothing."""
    count, away = section.layers_per_checkpoint, section.cpu_checkpointing
    kind = layer_class()
    if kind is None or not any(isinstance(each, kind) for each in module.modules()):
        if count > 1:
            raise DeepSpeedConfigError(
                f"activation_checkpointing.layers_per_checkpoint is {count}, but {type(module).__name__} has no layers "
                "of Transformers, whose checkpoints could be put together. Leave it out, and checkpoint several "
                "layers by one call of deepspeed.checkpointing.checkpoint.",
                path="activation_checkpointing.layers_per_checkpoint",
            )
        return forward
    if count == 1 and not away:
        return forward
    nothing_leaves = sys.maxsize
    offload = CheckpointHiddenStatesOffload(
        min_offload_bytes=1024 if away else nothing_leaves, keep_last_count=section.keep_last_count
    )
    offload.layers_per_checkpoint = count

    def call(*args: Any, **kwargs: Any) -> Any:
        with offload:
            return forward(*args, **kwargs)

    return call
