"""Tensors as small floats with a scale per group, under their published names."""

from __future__ import annotations

from deepspeed.ops.fp_quantizer.quantize import FP_Quantize, Quantizer, matmul_fp8

__all__ = ["FP_Quantize", "Quantizer", "matmul_fp8"]
