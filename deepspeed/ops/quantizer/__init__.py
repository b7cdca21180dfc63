"""`ds_quantizer`: groups of numbers rounded to few bits, in place, under its published name."""

from __future__ import annotations

from deepspeed.ops.quantizer.quantizer import ds_quantizer

__all__ = ["ds_quantizer"]
