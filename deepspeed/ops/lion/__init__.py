"""Lion: for parameters on the accelerator, and for parameters on the CPU."""

from __future__ import annotations

from deepspeed.ops.lion.cpu_lion import DeepSpeedCPULion
from deepspeed.ops.lion.fused_lion import FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
