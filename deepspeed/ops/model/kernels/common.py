"""What kernels share: how many elements and warps a program takes, activations, a number that programs raise."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deepspeed.ops.model.linear import WIDEST
from deepspeed.ops.precompile import is_placeholder


def cdiv(total: int, part: int) -> int:
    """How many parts a total has; Triton's own is for kernels, and takes longer than launching some of them."""
    return -(-total // part)


def next_power(number: int) -> int:
    """The power of two that is no less than a positive number."""
    return 1 << (number - 1).bit_length()


def row_block(columns: int) -> int:
    """The power of two that holds a row."""
    block = next_power(columns)
    if block > WIDEST:
        raise ValueError(f"rows of {columns} elements: the kernels take at most {WIDEST}")
    return block


def warps(block: int) -> int:
    """Warps for a program that holds `block` elements at a time: about 16 of 32 bits per thread."""
    return max(1, min(16, block // 512))


def programs(device: torch.device, rows: int, *, per_unit: int) -> int:
    """How many programs share the rows where each sums something over its own: `per_unit` of each processor at most."""
    if device.type != "cuda":
        return min(rows, 2)
    units = torch.cuda.get_device_properties(device).multi_processor_count
    return min(rows, units * per_unit)


def stages(block: int, dtype: torch.dtype) -> int:
    """How many rows a program that walks over them fetches ahead: as many as shared memory holds anywhere."""
    return 3 if block * dtype.itemsize <= 8192 else 1


def overlaps(device: torch.device) -> dict[str, bool]:
    """Options of a launch that may begin before the one ahead of it has ended: see `after_others`."""
    there = (device.type == "cuda" or is_placeholder(device)) and torch.version.hip is None
    fits = there and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if fits else {"PDL": False}


@triton.jit
def after_others(PDL: tl.constexpr):
    """Wait for what was launched before, then let the next launch begin: it waits here for this one.

    Before this a kernel reads only what no kernel around it writes, and it writes nothing.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


_LINE = tl.constexpr(128)


@triton.jit
def fetch_ahead(rows, needed, LINES: tl.constexpr, PDL: tl.constexpr):
    """Bring the first lines of these rows [rows], of which so many bytes are needed, to the device's cache.

    Before `after_others` this reads memory while what was launched before computes.
    """
    if PDL and LINES > 0:
        place = tl.arange(0, LINES)[None, :] * _LINE
        at = (rows.to(tl.int64) & -4)[:, None] + place
        left = (needed - place + tl.zeros_like(at)).to(tl.int32)
        tl.inline_asm_elementwise(
            "{.reg .pred p; setp.gt.s32 p, $2, 3; mov.u32 $0, 0; @p ld.global.L2::128B.b32 $0, [$1];}",
            "=r,l,r", [at, left], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def raise_to(place_ptr, value):
    """Let the number be `value` at least. Most programs see that it is higher by now, and need not wait in line."""
    if value > tl.load(place_ptr, cache_modifier=".cg"):
        tl.atomic_max(place_ptr, value)


KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


@triton.jit
def act(x, KIND: tl.constexpr):
    """(activation, derivative)"""
    if KIND == 0:
        sigmoid = tl.sigmoid(x)
        return x * sigmoid, sigmoid * (1.0 + x * (1.0 - sigmoid))
    elif KIND == 1:
        cdf = 0.5 * (1.0 + tl.math.erf(x * 0.7071067811865476))
        return x * cdf, cdf + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        half = tl.sigmoid(2.0 * inner)  # (1 + tanh(inner)) / 2
        slope = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * x * x)
        return x * half, half + x * 2.0 * half * (1.0 - half) * slope
