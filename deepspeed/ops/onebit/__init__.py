"""Optimizers whose ranks exchange signs: after a warm-up each rank's momentum travels in one bit per number."""

from __future__ import annotations

from deepspeed.ops.onebit.adam import OnebitAdam
from deepspeed.ops.onebit.lamb import OnebitLamb
from deepspeed.ops.onebit.zoadam import ZeroOneAdam

__all__ = ["OnebitAdam", "OnebitLamb", "ZeroOneAdam"]
