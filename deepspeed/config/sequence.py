"""The `sequence_parallel` section: how attention is computed over sequences that ranks share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .model import PositiveCount, Section
from .values import Lower

__all__ = ["SequenceParallelConfig"]


class SequenceParallelConfig(Section):
    """What the engine does for a model of Transformers; `sequence_parallel_size` is the number of ranks."""

    attention: Annotated[Literal["auto", "ulysses", "ring"], Lower] | None = Field(
        None,
        description="Whether ranks exchange heads (ulysses), pass keys on (ring), or what suits the model's heads "
        "(auto, also both); the engine then shares whole sequences out. null leaves all of that to the script.",
    )
    ulysses_size: PositiveCount | None = Field(
        None, description="Number of neighbouring ranks that exchange heads, with auto; keys travel between these."
    )
