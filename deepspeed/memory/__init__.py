"""Where model states live and how many bytes they take."""

from __future__ import annotations

from deepspeed.memory.budget import Budget, Part, Plan, Unit, budgets_of, place
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
from deepspeed.memory.plan_table import show
from deepspeed.memory.states import ModelStates, Spread, Widths, model_states
from deepspeed.memory.tiers import plan_states

__all__ = [
    "Budget",
    "ModelStates",
    "Part",
    "Plan",
    "Spread",
    "Unit",
    "Widths",
    "budgets_of",
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
    "place",
    "plan_states",
    "show",
]
