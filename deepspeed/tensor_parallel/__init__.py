"""Tensor parallelism: layers that several ranks share. `_assemble` calls `split_model`; nothing here knows a stage."""

from deepspeed.tensor_parallel.apply import cuts_of, splits_of
from deepspeed.tensor_parallel.build import SplitModel, plan_model, split_model
from deepspeed.tensor_parallel.gathering import cut_state, whole_of, whole_parameters
from deepspeed.tensor_parallel.marks import marked_splits

__all__ = [
    "SplitModel",
    "cut_state",
    "cuts_of",
    "marked_splits",
    "plan_model",
    "split_model",
    "splits_of",
    "whole_of",
    "whole_parameters",
]
