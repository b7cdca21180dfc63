"""The `compile` section: how `engine.compile()` works; nothing is compiled before that call."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from .model import Count, Section
from .values import raise_together

__all__ = ["CompileConfig"]


class CompileConfig(Section):
    """torch.compile with ZeRO inside the graph (DeepCompile)."""

    deepcompile: bool = Field(
        False, description="Whether engine.compile() uses DeepCompile instead of plain torch.compile."
    )
    region: Literal["auto", "blocks", "model"] = Field(
        "auto",
        description="What engine.compile() compiles: the repeated blocks of the model, or all of it; auto takes the "
        "blocks where there are some.",
    )
    passes: list[Literal["z1", "z3", "autosp", "autotp"]] | None = Field(
        None,
        description="Graph passes: autosp (sequence parallel) or autotp (tensor parallel); z1 and z3 follow the ZeRO "
        "stage anyway and have no effect of their own.",
    )
    autoep_non_moe: bool = Field(
        False, description="Whether only the parts around automatic expert-parallel layers are compiled."
    )
    free_activation: bool = Field(
        False, description="Whether large activations are freed early; the inductor backend does so by itself."
    )
    free_activation_threshold: Count = Field(
        10_485_760, description="Size from which an activation counts as large, in bytes."
    )
    offload_activation: bool = Field(
        False, description="Whether saved activations of 5 MiB and more are moved to host memory."
    )
    offload_activation_pin_memory: bool = Field(
        True, description="Whether the host buffers for activations are page-locked."
    )
    offload_opt_states: bool = Field(
        False, description="Whether optimizer state leaves the device during forward and backward (stage 3)."
    )
    offload_parameters: bool = Field(
        False, description="Whether parameters are offloaded; implied when ZeRO offloads parameters and optimizer."
    )
    double_buffer: bool = Field(True, description="Whether two reduction buckets take turns.")
    symmetric_memory: bool = Field(
        False, description="Whether collectives use symmetric memory between GPUs (stage 3)."
    )
    keep_int_input_tensors: bool = Field(
        True, description="Whether integer inputs keep their real values while a graph is profiled."
    )
    keep_all_input_tensors: bool = Field(
        False, description="Whether all inputs keep their real values while a graph is profiled."
    )
    debug_log: bool = Field(False, description="Whether the graphs are written out.")
    sync_before_reduce: bool = Field(
        False, description="Whether the device is synchronised before each reduction, for debugging."
    )
    sync_after_reduce: bool = Field(
        False, description="Whether the device is synchronised after each reduction, for debugging."
    )
    sync_before_allgather: bool = Field(
        False, description="Whether the device is synchronised before each gather, for debugging."
    )
    sync_after_allgather: bool = Field(
        False, description="Whether the device is synchronised after each gather, for debugging."
    )

    @model_validator(mode="after")
    def _rules(self) -> CompileConfig:
        problems = []
        offloads = [
            key for key in ("offload_activation", "offload_opt_states", "offload_parameters") if getattr(self, key)
        ]
        if len(offloads) > 1:
            problems.append(f"{' and '.join(offloads)} exclude each other; keep one")
        others = [name for name in self.passes or () if name != "autotp"]
        if self.passes and "autotp" in self.passes and others:
            problems.append(f"passes: autotp cannot be combined with {', '.join(others)}")
        if self.autoep_non_moe and self.deepcompile:
            problems.append("autoep_non_moe and deepcompile exclude each other; keep one")
        raise_together(problems)
        return self
