"""The `hangs` section: how long collectives may take, and what is told when one does not complete."""

from __future__ import annotations

from pydantic import Field

from .model import Section
from .values import Folder

__all__ = ["HangsConfig"]


class HangsConfig(Section):
    """Who keeps the others waiting is found out when a collective does not complete; times are in seconds."""

    enabled: bool = Field(True, description="Whether ranks tell each other where they are when a collective hangs.")
    timeout: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="How long a collective may take, in every process group; null leaves what each was made with.",
    )
    warn_after: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="After how long a slow rank is warned of; null is a minute, or half of a shorter timeout.",
    )
    patience: float = Field(
        3.0, gt=0, allow_inf_nan=False, description="How long other ranks get to tell where they are."
    )
    folder: Folder = Field(
        None, description="Where stacks of hanging ranks are written; null is the folder for temporary files."
    )
