"""Keys and values written to pages: ops `write_pages` and `rotary_write`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed.ops.model.linear import takes
from deepspeed.ops.model.rotary import rotary_reference
from deepspeed.ops.registry import by_triton, op, reference

__all__ = ["PageTarget", "rotary_write", "write_pages"]

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class PageTarget:
    """Where tokens go: pages [blocks, size, heads, width], and a slot for each token, -1 for none."""

    key_pages: Tensor
    value_pages: Tensor
    slots: Tensor
    key_scale: Tensor | None = None
    """float32 with 1 or [heads] elements: what is written is divided by this."""
    value_scale: Tensor | None = None


def write_pages(key: Tensor, value: Tensor, target: PageTarget) -> None:
    """Write [tokens, heads, width] to slots [tokens] = block · size + offset; a slot of -1 is skipped.

    Pages of 8 bits take what is closest to x / scale.
    """
    op("write_pages")(key, value, target)


def rotary_write(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, target: PageTarget) -> Tensor:
    """The rotated query [tokens, heads, width]; the rotated key and the value are written to pages in the same launch.

    cos and sin are [tokens, angles], as of op `rotary`: halves are rotated, what is wider than the angles stays.
    """
    result: Tensor = op("rotary_write")(query, key, value, cos, sin, target)
    return result


@reference("write_pages")
@torch.no_grad()
def write_pages_reference(key: Tensor, value: Tensor, target: PageTarget) -> None:
    """In plain torch."""
    chosen = target.slots >= 0
    whole = bool(chosen.all())
    slots = target.slots if whole else target.slots[chosen]
    pairs = ((key, target.key_pages, target.key_scale), (value, target.value_pages, target.value_scale))
    for x, pages, scale in pairs:
        rows = x if whole else x[chosen]
        size = pages.shape[1]
        pages[slots // size, slots % size] = _narrowed(rows, scale, pages.dtype)


def _narrowed(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    if scale is not None:
        x = x.float() / scale.view(-1, 1)
    if dtype == E4M3:
        limit = torch.finfo(dtype).max
        x = x.float().clamp(-limit, limit)
    return x.to(dtype)


@reference("rotary_write")
@torch.no_grad()
def rotary_write_reference(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, target: PageTarget
) -> Tensor:
    """In plain torch."""
    q, k = (x.transpose(0, 1).unsqueeze(0) for x in (query, key))
    q, k = (x[0].transpose(0, 1) for x in rotary_reference(q, k, cos.unsqueeze(0), sin.unsqueeze(0)))
    write_pages_reference(k, value, target)
    return q.contiguous()


def _fits(target: PageTarget, *tensors: Tensor) -> bool:
    every = (*tensors, target.key_pages, target.value_pages)
    return all(takes(x) for x in tensors) and all(x.stride(-1) == 1 for x in every)


@by_triton("write_pages")
@torch.no_grad()
def write_pages_triton(key: Tensor, value: Tensor, target: PageTarget) -> None:
    """By the kernel where it can."""
    if not _fits(target, key, value):
        return write_pages_reference(key, value, target)
    from deepspeed.ops.generate.kernels.pages import write

    return write(key, value, target)


@by_triton("rotary_write")
@torch.no_grad()
def rotary_write_triton(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, target: PageTarget
) -> Tensor:
    """By the kernel where it can."""
    if not _fits(target, query, key, value, cos, sin) or cos.shape[-1] % 2 or not 0 < cos.shape[-1] <= query.shape[-1]:
        return rotary_write_reference(query, key, value, cos, sin, target)
    from deepspeed.ops.generate.kernels.pages import rotate_and_write

    return rotate_and_write(query, key, value, cos, sin, target)
