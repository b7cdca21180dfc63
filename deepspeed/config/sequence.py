"""The `sequence_parallel` section: sequences that ranks share, and tiles of long ones."""

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
    tiled_compute: PositiveCount | None = Field(
        None,
        description="Tokens of a tile in which MLPs and norms of a model of Transformers are computed; what they need "
        "inside exists for one tile. null computes them whole.",
    )
    tiled_loss: PositiveCount | None = Field(
        None,
        description="Tokens of a tile in which logits and loss of a causal model of Transformers are computed in "
        "training; its outputs then have no logits. null computes them whole.",
    )
