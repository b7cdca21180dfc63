"""The `optimizer_in_backward` section: parameters are updated while backward brings their gradients."""

from __future__ import annotations

from pydantic import Field

from .model import Section

__all__ = ["OptimizerInBackwardConfig"]


class OptimizerInBackwardConfig(Section):
    """Whether gradients are used up as they come, so that they never exist all at once."""

    enabled: bool = Field(
        False,
        description="Whether each parameter is updated, and its gradient freed, during the last backward of a step.",
    )
    clip_by_last_norm: bool = Field(
        False,
        description="Whether gradient_clipping acts by the norm of the step before: its own is known too late.",
    )
