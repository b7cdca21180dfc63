"""The `zero_optimization.zenflow` block: important gradients at once on the device, the rest later on the CPU."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Gt, Lt
from pydantic import Field, model_validator

from .model import Count, Section, Share
from .values import CountOrAuto, Number, raise_together

__all__ = ["ZenFlowConfig"]


class ZenFlowConfig(Section):
    """ZenFlow; the presence of the block switches it on."""

    topk_ratio: Annotated[Number, Gt(0), Lt(1)] = Field(
        0.1, description="Share of the gradient columns that is applied on the device at once (above 0, below 1)."
    )
    select_strategy: Literal["auto", "step", "epoch"] = Field(
        "auto", description="Unit in which select_interval counts; auto selects anew once per epoch."
    )
    select_interval: CountOrAuto = Field(
        "auto", description="Number of steps or epochs between two selections of the important columns."
    )
    update_interval: CountOrAuto = Field(
        "auto", description="Number of steps between two applications of the deferred gradients."
    )
    overlap_step: bool = Field(
        False, description="Whether the CPU update goes on while the script does, on a CPU as well."
    )
    offload: bool = Field(
        False,
        description="Whether the optimizer state of the selected columns is offloaded too; needs overlap_comm.",
    )
    auto_ratio: Share = Field(
        0.99,
        description="Share of the parameters that must ask for an update before auto mode applies one (0 to 1).",
    )
    full_warm_up_rounds: Count = Field(0, description="Number of first steps that update every column.")
    pt_reserved_cores_perc: Share = Field(
        0.5, description="Share of the CPU threads kept for the training while that update goes on (0 to 1)."
    )
    steps_per_epoch: Count | None = Field(
        None, description="Number of steps in an epoch; null takes the length of the data loader."
    )

    @model_validator(mode="after")
    def _rules(self) -> ZenFlowConfig:
        problems = []
        select, update = self.select_interval, self.update_interval
        if self.select_strategy == "auto" and select != "auto":
            problems.append(
                f'select_interval is {select} while select_strategy is "auto"; choose "step" or "epoch", '
                "or leave the interval out"
            )
        if self.select_strategy != "auto" and select == "auto":
            problems.append(
                f'select_interval must be a number with select_strategy "{self.select_strategy}", found "auto"'
            )
        # Epochs become steps only when the loader's length is known, so they are compared by the engine.
        if self.select_strategy == "step" and select != "auto" and update != "auto" and update > select:
            problems.append(f"update_interval ({update}) must not exceed select_interval ({select})")
        raise_together(problems)
        return self
