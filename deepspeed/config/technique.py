"""What all techniques of `compression_training` share: groups of modules, each with its own parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from annotated_types import Gt, Le
from pydantic import Field

from .model import Count, Section
from .values import Number, Patterns, absent

__all__ = ["DenseRatio", "GroupConfig", "SharedConfig", "group_problems"]

DenseRatio = Annotated[Number, Gt(0), Le(1)]
"""Share of the weights that is kept."""


class SharedConfig(Section):
    """What every technique's `shared_parameters` have."""

    enabled: bool = Field(False, description="Whether the technique is applied.")
    schedule_offset: Count = Field(1000, description="Optimizer step at which the technique begins.")


class GroupConfig(Section):
    """Modules that are treated alike; subclasses add the parameters."""

    modules: Patterns = Field(["*"], description='Regular expressions searched in module names; "*" is every module.')
    related_modules: list[Patterns] | None = Field(
        None, description="For each entry of modules, the neighbours whose size shrinks with it."
    )


def group_problems(name: str, params: Mapping[str, Section], required: Sequence[str]) -> list[str]:
    """What the groups of an enabled technique lack; `params` maps each group's name to its parameters."""
    if not params:
        return [f"different_groups must name at least one group when {name} is enabled"]
    return [
        f"different_groups.{group}.params.{key} must be given when {name} is enabled"
        for group, values in params.items()
        for key in absent(values, required)
    ]
