"""AdamW over many tensors in one launch: unscale, clip, update, cast to the model's dtype in one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed.ops.adam.rule import AdamRule, Conditions

__all__ = ["adam_many"]

_BLOCK = 512
_WARPS = 8
_ALIGNED = 16

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _pointer(table, place, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    found = tl.load(table + place).to(tl.pointer_type(TYPE))
    if ALIGNED:
        found = tl.multiple_of(found, 16)
    return found


@triton.jit
def _update(
    table, owners, places, divisor_ptr, skip_ptr, factor, lr, beta1, beta2, eps, decay, first, second,
    PARAM: tl.constexpr, GRAD: tl.constexpr, MOMENT: tl.constexpr, OUT: tl.constexpr, HAS_OUT: tl.constexpr,
    DECOUPLED: tl.constexpr, CONDITIONS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    tensor = tl.load(owners + number)
    start = (number - tl.load(places + 2 * tensor)) * BLOCK
    size = tl.load(places + 2 * tensor + 1)
    scale = factor
    if CONDITIONS:
        if tl.load(skip_ptr) != 0.0:
            return
        scale = factor / tl.load(divisor_ptr)
    p_ptr = _pointer(table, 5 * tensor, PARAM, ALIGNED)
    g_ptr = _pointer(table, 5 * tensor + 1, GRAD, ALIGNED)
    m_ptr = _pointer(table, 5 * tensor + 2, MOMENT, ALIGNED)
    v_ptr = _pointer(table, 5 * tensor + 3, MOMENT, ALIGNED)
    out_ptr = _pointer(table, 5 * tensor + 4, OUT, ALIGNED)
    at = start + tl.arange(0, BLOCK)
    inside = at < size
    p = tl.load(p_ptr + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32) * scale
    m = tl.load(m_ptr + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if DECOUPLED:
        p = p * (1.0 - lr * decay)
    else:
        g = g + decay * p
    m = m + (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    p = p - lr / first * m / (tl.sqrt(v) / second + eps)
    tl.store(p_ptr + at, p.to(PARAM), mask=inside)
    tl.store(m_ptr + at, m.to(MOMENT), mask=inside)
    tl.store(v_ptr + at, v.to(MOMENT), mask=inside)
    if HAS_OUT:
        tl.store(out_ptr + at, p.to(OUT), mask=inside)


def adam_many(
    lists: Sequence[Sequence[Tensor]],
    outs: Sequence[Tensor],
    step: int,
    rule: AdamRule,
    *,
    factor: float = 1.0,
    conditions: Conditions | None = None,
) -> None:
    """Update (params, grads, exp_avgs, exp_avg_sqs), contiguous, of one dtype each; `outs` get the params as well."""
    params = lists[0]
    sizes = [param.numel() for param in params]
    columns = [*lists, outs or params]
    pointers = [tensor.data_ptr() for row in zip(*columns, strict=True) for tensor in row]
    device = params[0].device
    table = _sent(torch.tensor(pointers, dtype=torch.int64), device)
    owners, places = _programs(tuple(sizes), device)
    first, second = rule.corrections(step)
    anything = params[0]  # where there are no conditions nothing is read
    grads, moments = lists[1], lists[2]
    _update[(owners.numel(),)](
        table, owners, places, anything if conditions is None else conditions.divisor,
        anything if conditions is None else conditions.skip, factor,
        rule.lr, rule.beta1, rule.beta2, rule.eps, rule.weight_decay, first, second**0.5,
        PARAM=_TYPES[anything.dtype], GRAD=_TYPES[grads[0].dtype], MOMENT=_TYPES[moments[0].dtype],
        OUT=_TYPES[columns[4][0].dtype], HAS_OUT=bool(outs), DECOUPLED=rule.decoupled,
        CONDITIONS=conditions is not None, ALIGNED=all(pointer % _ALIGNED == 0 for pointer in pointers),
        BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip


@lru_cache(maxsize=16)
def _programs(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """(the tensor of each program; the first program and the size of each tensor), the same at every step."""
    numels = torch.tensor(sizes, dtype=torch.int64)
    counts = (numels + _BLOCK - 1) // _BLOCK
    owners = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), counts)
    places = torch.stack((counts.cumsum(0) - counts, numels), 1)
    return _sent(owners, device), _sent(places, device)


def _sent(table: Tensor, device: torch.device) -> Tensor:
    return table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)
