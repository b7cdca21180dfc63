"""Attention of some queries to some keys, with its log-sum-exp, so that blocks can be merged; and its backward.

Tensors are [batch, heads, length, width], keys and values with as many heads as queries or fewer. `merge` makes of the
results over two sets of keys the result over both. The backward of a block takes the merged result and log-sum-exp:
with these, the gradients of blocks are summands of the whole gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_ROWS = 1024  # queries for which scores exist at once in the torch implementation
_aten = torch.ops.aten


@dataclass(frozen=True)
class AttentionBlock:
    """How the queries of a block see its keys."""

    scale: float
    causal: bool = False
    """Query i sees the keys up to i; there are as many of one as of the other."""
    mask: Callable[[slice], Tensor] | None = None
    """Of some rows of queries, True where one sees a key: [batch or 1, 1, rows, keys]."""


def forward(query: Tensor, key: Tensor, value: Tensor, block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """(result, log-sum-exp [batch, heads, queries]), the latter in float32."""
    key, value = _spread(key, query), _spread(value, query)
    if block.mask is None and _flash_on_cuda(query, value):
        out, lse = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, block.causal, scale=block.scale)[
            :2
        ]
        return out, lse[..., : query.shape[2]]
    if block.mask is None and _flash_on_cpu(query, value):
        return _aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
            query, key, value, 0.0, block.causal, scale=block.scale
        )
    return _forward(query, key, value, block)


def backward(
    grad: Tensor, saved: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor, block: AttentionBlock
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (query, key, value), of which `saved` are the values; `out` and `lse` are the merged ones."""
    query, key, value = saved[0], _spread(saved[1], saved[0]), _spread(saved[2], saved[0])
    arguments = (grad, query, key, value, out, lse.contiguous())  # torch's kernels read it as if it were dense
    if block.mask is None and _flash_on_cuda(query, value):
        lengths = query.shape[2], key.shape[2]
        dice = [torch.zeros(shape, dtype=torch.uint64, device=query.device) for shape in ((2,), ())]  # of no dropout
        found = _aten._scaled_dot_product_flash_attention_backward(
            *arguments, None, None, *lengths, 0.0, block.causal, *dice, scale=block.scale
        )
    elif block.mask is None and _flash_on_cpu(query, value):
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *arguments, 0.0, block.causal, scale=block.scale
        )
    else:
        found = _backward(grad, (query, key, value), out, lse, block)
    return found[0], _gather(found[1], saved[1]), _gather(found[2], saved[2])


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The result over the keys of both; `out` is in float32."""
    merged = torch.logaddexp(lse, block_lse)
    base = torch.where(seen_anything(merged), merged, 0.0)  # a query that saw nothing yet: weights 0, not nan
    return out * (lse - base).exp()[..., None] + block_out * (block_lse - base).exp()[..., None], merged


def seen_anything(lse: Tensor) -> Tensor:
    """True for queries that have seen a key."""
    return lse != -torch.inf


def _spread(heads: Tensor, like: Tensor) -> Tensor:
    """Key/value heads as often as query heads use them."""
    repeats = like.shape[1] // heads.shape[1]
    return heads if repeats == 1 else torch.repeat_interleave(heads, repeats, 1)


def _gather(grad: Tensor, like: Tensor) -> Tensor:
    """The sum over the query heads that shared a head."""
    if grad.shape[1] == like.shape[1]:
        return grad
    parts: Tensor = grad.unflatten(1, (like.shape[1], -1))
    return parts.sum(2, dtype=torch.float32).to(grad.dtype)


def _flash_on_cuda(query: Tensor, value: Tensor) -> bool:
    fits = query.shape[-1] == value.shape[-1] <= 256 and query.shape[-1] % 8 == 0
    return query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and fits


def _flash_on_cpu(query: Tensor, value: Tensor) -> bool:
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def _parts(query: Tensor, keys: int, block: AttentionBlock) -> list[tuple[slice, Tensor | None]]:
    """Rows of queries, few enough that their scores fit, and what each sees."""
    parts: list[tuple[slice, Tensor | None]] = []
    for begin in range(0, query.shape[2], _ROWS):
        rows = slice(begin, min(begin + _ROWS, query.shape[2]))
        seen = None if block.mask is None else block.mask(rows)
        if block.causal:
            at = torch.arange(keys, device=query.device)
            seen = at[rows, None] >= at[None]
        parts.append((rows, seen))
    return parts


def _scores(query: Tensor, key: Tensor, seen: Tensor | None, block: AttentionBlock) -> Tensor:
    scores = query.float() @ key.float().transpose(2, 3) * block.scale
    return scores if seen is None else scores.masked_fill(~seen, -torch.inf)


def _forward(query: Tensor, key: Tensor, value: Tensor, block: AttentionBlock) -> tuple[Tensor, Tensor]:
    outs, sums = [], []
    for rows, seen in _parts(query, key.shape[2], block):
        scores = _scores(query[:, :, rows], key, seen, block)
        lse = scores.logsumexp(-1)
        weights = (scores - torch.where(seen_anything(lse), lse, 0.0)[..., None]).exp()
        outs.append((weights @ value.float()).to(query.dtype))
        sums.append(lse)
    return torch.cat(outs, 2), torch.cat(sums, 2)


def _backward(
    grad: Tensor, saved: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor, block: AttentionBlock
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = saved
    queries = []
    keys, values = torch.zeros_like(key, dtype=torch.float32), torch.zeros_like(value, dtype=torch.float32)
    for rows, seen in _parts(query, key.shape[2], block):
        part, flow, total = query[:, :, rows], grad[:, :, rows].float(), lse[:, :, rows]
        scores = _scores(part, key, seen, block)
        weights = (scores - torch.where(seen_anything(total), total, torch.inf)[..., None]).exp()
        values += weights.transpose(2, 3) @ flow
        drift = (flow * out[:, :, rows].float()).sum(-1, keepdim=True)
        change = weights * (flow @ value.float().transpose(2, 3) - drift) * block.scale
        queries.append((change @ key.float()).to(query.dtype))
        keys += change.transpose(2, 3) @ part.float()
    return torch.cat(queries, 2), keys.to(key.dtype), values.to(value.dtype)
