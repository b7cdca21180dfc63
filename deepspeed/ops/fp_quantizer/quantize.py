"""`FP_Quantize`: groups of a tensor as floats of 12, 8, 6 or 4 bits, with the codecs of `ops/codecs`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed.errors import UsageError
from deepspeed.ops.codecs import rows
from deepspeed.ops.codecs.formats import FORMATS

__all__ = ["FP_Quantize", "Quantizer", "matmul_fp8"]

_FORMATS = {(8, 3): "fp8_e4m3", (8, 2): "fp8_e5m2", (12, 4): "fp12", (6, 2): "fp6", (4, 1): "fp4"}
_MANTISSA = {12: 4, 6: 2, 4: 1}  # the only one of these widths


class _Last(NamedTuple):
    """What was quantised last: its scales, and what it was."""

    scale: Tensor
    shape: torch.Size
    dtype: torch.dtype


class FloatQuantizer(ABC):
    """Quantises tensors in groups of `group_size` elements."""

    def __init__(self, group_size: int = 512) -> None:
        self.group_size = group_size

    @abstractmethod
    def quantize(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The codes of a tensor, a row for each group."""

    @abstractmethod
    def dequantize(self, input_q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The tensor that codes stand for."""


Quantizer = FloatQuantizer
"""Its published name."""


class FP_Quantize(FloatQuantizer):
    """Small floats; remembers the scales, the shape and the dtype of what it quantised last.

    `quantization_config`: an object with `group_size`, such as `deepspeed.linear.QuantizationConfig`; None: 512.
    """

    def __init__(self, quantization_config: Any = None) -> None:
        super().__init__(int(getattr(quantization_config, "group_size", 512)))
        self.quantization_config = quantization_config
        self._last: _Last | None = None

    def quantize(
        self,
        input: Tensor,
        q_bits: int = 8,
        q_mantisa_bits: int = 3,
        stochastic_mode: bool = False,
        return_meta_tensor: bool = False,
    ) -> Any:
        """`[groups, bytes]` codes, and with `return_meta_tensor` the `[groups, 1]` scales after them."""
        if stochastic_mode:
            raise UsageError(
                "FP_Quantize.quantize: stochastic_mode is for integers; small floats are rounded to nearest"
            )
        form, size = float_format(q_bits, q_mantisa_bits), self.group_size
        if input.numel() % size or size % FORMATS[form].lanes:
            raise UsageError(
                f"FP_Quantize.quantize: groups of {size} do not divide the {input.numel()} elements; use a group_size "
                "that does"
            )
        values = input.detach().reshape(-1, size).contiguous()
        codes = values.new_empty(len(values), FORMATS[form].payload_bytes(size, size), dtype=torch.uint8)
        scales = values.new_empty(len(values), 1, dtype=torch.float32)
        rows.encode(form, size, ((0, size, 0, 0),), values, codes, scales)
        self._last = _Last(scales, input.shape, input.dtype)
        return (codes, scales) if return_meta_tensor else codes

    def get_scales(self) -> Tensor:
        """The scales of what was quantised last."""
        return self._known("get_scales").scale

    def to(self, *args: Any, **kwargs: Any) -> None:
        """Move the scales as `Tensor.to` does; they stay float32."""
        known = self._known("to")
        self._last = known._replace(scale=known.scale.to(*args, **kwargs).float())

    def dequantize(
        self,
        input_q: Tensor,
        fp_out: Tensor | None = None,
        q_bits: int = 8,
        q_mantisa_bits: int = 3,
        scale: Tensor | None = None,
    ) -> Tensor:
        """As it was quantised last, or in `fp_out`; `scale` replaces the scales that are remembered."""
        known = self._known("dequantize") if fp_out is None or scale is None else None
        if fp_out is None:
            assert known is not None, "just looked up"
            fp_out = torch.empty(known.shape, dtype=known.dtype, device=input_q.device)
        scales = scale if known is None or scale is not None else known.scale
        assert scales is not None, "one of both is known"
        out = torch.empty(len(input_q), self.group_size, dtype=fp_out.dtype, device=input_q.device)
        form, size = float_format(q_bits, q_mantisa_bits), self.group_size
        rows.decode_sum(form, size, ((0, size, 0, 0),), input_q[None], scales.view(1, -1, 1), out)
        return fp_out.copy_(out.view(fp_out.shape))

    def selective_dequantize(
        self,
        input_q: Tensor,
        indexes: Tensor,
        fp_out: Tensor | None = None,
        q_bits: int = 8,
        q_mantisa_bits: int = 3,
        scale: Tensor | None = None,
    ) -> Tensor:
        """The rows `indexes` of the first dimension of what was quantised last."""
        known = self._known("selective_dequantize")
        count, parts = known.shape[0], len(input_q) // known.shape[0]
        if len(input_q) % count:
            raise UsageError(
                f"FP_Quantize.selective_dequantize: {len(input_q)} groups do not fall into the {count} rows of the "
                "tensor; use a group_size that divides a row"
            )
        scales = (known.scale if scale is None else scale).view(count, parts)[indexes].reshape(-1, 1)
        chosen = input_q.view(count, parts, -1)[indexes].flatten(0, 1)
        if fp_out is None:
            shape = (len(indexes), *known.shape[1:])
            fp_out = torch.empty(shape, dtype=known.dtype, device=input_q.device)
        return self.dequantize(chosen, fp_out, q_bits, q_mantisa_bits, scales)

    def _known(self, call: str) -> _Last:
        if self._last is None:
            raise UsageError(f"FP_Quantize.{call}: nothing was quantised with this object yet; call quantize first")
        return self._last


def matmul_fp8(
    inp: Tensor, weight: Tensor, scale: Tensor, quantization_group_size: int, quantizer: FP_Quantize
) -> Tensor:
    """The product of `inp` with an 8-bit `weight` `[in, out]` of these scales, in the dtype of `inp`."""
    shape = quantizer._known("quantize").shape
    out = torch.empty(shape, dtype=inp.dtype, device=inp.device)
    return inp @ quantizer.dequantize(weight, fp_out=out, scale=scale)


def float_format(bits: int, mantissa: int, caller: str = "FP_Quantize") -> str:
    """The name of the format of small floats with these widths."""
    found = _FORMATS.get((bits, _MANTISSA.get(bits, mantissa)))
    if found is None:
        raise UsageError(
            f"{caller}: {bits} bits with {mantissa} of mantissa are not known; use 8 bits with 3 or 2, 12, 6 or 4"
        )
    return found
