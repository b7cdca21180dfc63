"""Where model states live and how many bytes they take."""

from __future__ import annotations

from deepspeed.memory.budget import ModelStates, Spread, Widths, model_states, plan_states, show
from deepspeed.memory.estimate import (
    estimate_zero1_model_states_mem_needs,
    estimate_zero1_model_states_mem_needs_all_cold,
    estimate_zero1_model_states_mem_needs_all_live,
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)

__all__ = [
    "ModelStates",
    "Spread",
    "Widths",
    "estimate_zero1_model_states_mem_needs",
    "estimate_zero1_model_states_mem_needs_all_cold",
    "estimate_zero1_model_states_mem_needs_all_live",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "model_states",
    "plan_states",
    "show",
]
