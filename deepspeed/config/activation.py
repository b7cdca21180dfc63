"""The `activation_checkpointing` section: how saved activations are kept until backward."""

from __future__ import annotations

from pydantic import Field

from .model import Count, PositiveCount, Section

__all__ = ["ActivationCheckpointingConfig"]


class ActivationCheckpointingConfig(Section):
    """Defaults of `deepspeed.checkpointing.configure`; arguments of that call take precedence."""

    partition_activations: bool = Field(
        False, description="Whether saved inputs are sharded over the model-parallel ranks."
    )
    cpu_checkpointing: bool = Field(
        False, description="Whether saved inputs wait in host memory, copied there and back beside computation."
    )
    contiguous_memory_optimization: bool = Field(
        False,
        description="Whether all saved inputs share one buffer; needs partition_activations and number_checkpoints.",
    )
    number_checkpoints: PositiveCount | None = Field(
        None, description="Number of checkpointed calls in one forward pass, which gives that buffer its size."
    )
    synchronize_checkpoint_boundary: bool = Field(
        False, description="Whether the device is synchronised at the start and end of each checkpointed call."
    )
    keep_last_count: Count = Field(
        1, description="Newest saved inputs that stay on the device with cpu_checkpointing; backward begins with them."
    )
    layers_per_checkpoint: PositiveCount = Field(
        1,
        description="Layers of Transformers in a row of which only the first one's input is saved; backward computes "
        "the others' from it.",
    )
    profile: bool = Field(False, description="Whether the time of each checkpointed call is measured.")
