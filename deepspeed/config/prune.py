"""Pruning in `compression_training`: single weights, rows, attention heads, channels."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Lt
from pydantic import Field, model_validator

from .model import Count, PositiveCount, Section
from .technique import DenseRatio, GroupConfig, SharedConfig, group_problems
from .values import Names, raise_together

__all__ = [
    "ChannelPruningConfig",
    "HeadPruningConfig",
    "HeadPruningShared",
    "PruningGroup",
    "PruningParams",
    "PruningShared",
    "RowPruningConfig",
    "SparsePruningConfig",
    "SparsePruningShared",
]


class PruningParams(Section):
    """How much of one group is kept."""

    dense_ratio: DenseRatio | None = Field(None, description="Share that is kept (above 0, up to 1).")


class PruningGroup(GroupConfig):
    """One group of pruned modules."""

    params: PruningParams = Field(default_factory=PruningParams, description="How much of this group is kept.")


_Groups = dict[str, PruningGroup]


def _pruning_problems(name: str, groups: _Groups) -> list[str]:
    return group_problems(name, {key: group.params for key, group in groups.items()}, ("dense_ratio",))


class PruningShared(SharedConfig):
    """What all groups of pruned rows or channels share."""

    method: Literal["l1", "topk"] = Field(
        "l1", description="l1 keeps what has the largest norm, topk learns what to keep."
    )


class SparsePruningShared(SharedConfig):
    """What all groups of sparsely pruned weights share."""

    method: Literal["l1", "topk", "snip_momentum"] = Field(
        "l1", description="l1 keeps the largest weights, topk learns them, snip_momentum prunes block by block."
    )
    block_pattern: str = Field("4x1", description="Rows x columns of the blocks (snip_momentum).")
    dense_ratio: Annotated[DenseRatio, Lt(1)] = Field(
        0.1, description="Share that is kept in the end (above 0, below 1; snip_momentum)."
    )
    schedule_offset_stride: PositiveCount = Field(
        1, description="Number of steps between two prunings (snip_momentum)."
    )
    schedule_offset_end: Count | None = Field(
        None, description="Optimizer step of the last pruning; null means schedule_offset (snip_momentum)."
    )
    excluded_modules: Names = Field([], description="Modules that are left alone (snip_momentum).")

    @model_validator(mode="after")
    def _rules(self) -> SparsePruningShared:
        end = self.schedule_offset_end
        if self.enabled and end is not None and end < self.schedule_offset:
            raise ValueError(f"schedule_offset_end ({end}) lies before schedule_offset ({self.schedule_offset})")
        return self


class HeadPruningShared(SharedConfig):
    """What all groups of pruned heads share."""

    method: Literal["topk", "l1"] = Field(
        "topk", description="topk learns which heads to keep; l1 does not exist for heads."
    )
    num_heads: PositiveCount | None = Field(None, description="Number of attention heads; must be given when enabled.")

    @model_validator(mode="after")
    def _rules(self) -> HeadPruningShared:
        if self.enabled:
            problems = []
            if self.num_heads is None:
                problems.append("num_heads must be given when head_pruning is enabled")
            if self.method == "l1":
                problems.append('method "l1" does not exist for heads; use "topk"')
            raise_together(problems)
        return self


class SparsePruningConfig(Section):
    """Single weights or blocks of weights set to zero."""

    shared_parameters: SparsePruningShared = Field(
        default_factory=SparsePruningShared, description="What all groups share."
    )
    different_groups: _Groups = Field({}, description="Name of a group -> its modules and how much is kept.")

    @model_validator(mode="after")
    def _rules(self) -> SparsePruningConfig:
        if self.shared_parameters.enabled:
            raise_together(_pruning_problems("sparse_pruning", self.different_groups))
        return self


class RowPruningConfig(Section):
    """Whole rows of linear weights removed."""

    shared_parameters: PruningShared = Field(default_factory=PruningShared, description="What all groups share.")
    different_groups: _Groups = Field({}, description="Name of a group -> its modules and how much is kept.")

    @model_validator(mode="after")
    def _rules(self) -> RowPruningConfig:
        if self.shared_parameters.enabled:
            raise_together(_pruning_problems("row_pruning", self.different_groups))
        return self


class HeadPruningConfig(Section):
    """Whole attention heads removed."""

    shared_parameters: HeadPruningShared = Field(
        default_factory=HeadPruningShared, description="What all groups share."
    )
    different_groups: _Groups = Field({}, description="Name of a group -> its modules and how much is kept.")

    @model_validator(mode="after")
    def _rules(self) -> HeadPruningConfig:
        if self.shared_parameters.enabled:
            raise_together(_pruning_problems("head_pruning", self.different_groups))
        return self


class ChannelPruningConfig(Section):
    """Whole channels of convolutions removed."""

    shared_parameters: PruningShared = Field(default_factory=PruningShared, description="What all groups share.")
    different_groups: _Groups = Field({}, description="Name of a group -> its modules and how much is kept.")

    @model_validator(mode="after")
    def _rules(self) -> ChannelPruningConfig:
        if self.shared_parameters.enabled:
            raise_together(_pruning_problems("channel_pruning", self.different_groups))
        return self
