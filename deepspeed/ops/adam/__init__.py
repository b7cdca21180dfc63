"""Adam and AdamW: for parameters on the accelerator, and for parameters on the CPU."""

from __future__ import annotations

from deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam
from deepspeed.ops.adam.fused_adam import FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
