"""Dtypes and their names in the config."""

from __future__ import annotations

import torch

__all__ = ["CASTABLE", "DTYPES", "short"]

DTYPES: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

CASTABLE = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
"""What a cast may change. Eight-bit floats are quantised values, which mean nothing without their scales."""

_SHORT = {dtype: name for name, dtype in DTYPES.items()}


def short(dtype: torch.dtype) -> str:
    """`bf16` for torch.bfloat16; torch's own name where the config has none."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))
