"""LAMB: Adam with a trust ratio per parameter, for large batches."""

from __future__ import annotations

from deepspeed.ops.lamb.fused_lamb import FusedLamb

__all__ = ["FusedLamb"]
