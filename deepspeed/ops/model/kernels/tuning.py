"""How many elements and warps a program of a kernel takes."""

from __future__ import annotations

import torch

from deepspeed.ops.model.device import WIDEST

__all__ = ["cdiv", "next_power", "programs", "row_block", "stages", "warps"]


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
