"""Tensor parallelism: layers that several ranks share. `_assemble` calls `split_model`; nothing here knows a stage."""

from deepspeed.parallel.regions import GroupMembers, RankGroup, whole_of
from deepspeed.tensor_parallel.apply import cut_state, cuts_of, marked_splits, splits_of, whole_parameters
from deepspeed.tensor_parallel.build import SplitModel, plan_model, split, split_model

__all__ = [
    "GroupMembers",
    "RankGroup",
    "SplitModel",
    "cut_state",
    "cuts_of",
    "marked_splits",
    "plan_model",
    "split",
    "split_model",
    "splits_of",
    "whole_of",
    "whole_parameters",
]
