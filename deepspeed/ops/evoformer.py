"""Attention with two biases, as blocks of Evoformer have it, in memory that does not grow with the scores.

softmax(Q·Kᵀ/√d + bias of keys + bias of pairs)·V: the reference computes it for a part of the rows at a time, kernels
for tiles of scores, and both once more in backward. What is kept are the inputs, the output and two numbers for each
query.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed.errors import UsageError
from deepspeed.ops.model.linear import takes
from deepspeed.ops.registry import by_triton, op, reference

__all__ = ["DS4Sci_EvoformerAttention"]

_SCORES = 2**23
"""Scores that exist at a time: 32 MiB in fp32, which a large GPU keeps in its cache."""

_WIDEST = 128
"""Elements of a head that the kernels hold."""

_Part = tuple[slice, slice, slice]
"""Samples, rows and queries."""
_Run = TypeVar("_Run", bound=Callable[..., Any])


def _steps(shape: torch.Size, keys: int) -> tuple[int, int]:
    """Rows and queries of a part of [samples, rows, queries, heads, d]: at most `_SCORES` scores, or one query."""
    queries, heads = shape[2:4]
    some = max(1, min(queries, _SCORES // max(1, heads * keys)))
    return (max(1, _SCORES // max(1, heads * keys * queries)) if some == queries else 1), some


def _parts(shape: torch.Size, keys: int) -> Iterator[_Part]:
    rows, queries = _steps(shape, keys)
    for sample, row, query in itertools.product(range(shape[0]), range(0, shape[1], rows), range(0, shape[2], queries)):
        yield slice(sample, sample + 1), slice(row, row + rows), slice(query, query + queries)


def _of_part(bias: Tensor, part: _Part) -> Tensor:
    """The part of a bias [samples, rows, heads, queries, keys]; a dim of one is the same for all."""
    samples, rows, queries = (
        at if size > 1 else slice(None) for at, size in zip(part, (*bias.shape[:2], bias.shape[3]), strict=True)
    )
    return bias[samples, rows, :, queries]


def _by_head(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """[samples, rows, tokens, heads, d] as [samples, rows, heads, tokens, d] in the dtype of arithmetic."""
    return tensor.transpose(2, 3).to(dtype)


def _scores(query: Tensor, key: Tensor, biases: Sequence[Tensor], part: _Part) -> Tensor:
    scores = (query / math.sqrt(query.shape[-1])) @ key.transpose(-2, -1)
    for bias in biases:
        scores += _of_part(bias, part)
    return scores


def _in_its_dtypes(run: _Run) -> _Run:
    """Keep autocast away, which would multiply in 16 bits."""

    @functools.wraps(run)
    def exact(ctx: Any, first: Tensor, *rest: Any) -> Any:
        with torch.autocast(first.device.type, enabled=False):
            return run(ctx, first, *rest)

    return exact  # type: ignore[return-value]


class _EvoformerAttention(torch.autograd.Function):
    """The parts one after the other; gradients of a bias are summed over what it is broadcast to."""

    @staticmethod
    @_in_its_dtypes
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *biases: Tensor) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        most, inverse = (
            query.new_empty((*query.shape[:2], query.shape[3], query.shape[2], 1), dtype=wide) for _ in range(2)
        )
        for part in _parts(query.shape, key.shape[2]):
            samples, rows, queries = part
            scores = _scores(_by_head(query[part], wide), _by_head(key[samples, rows], wide), biases, part)
            top = scores.amax(-1, keepdim=True)
            top.masked_fill_(top == -math.inf, 0.0)
            weights = scores.sub_(top).exp_()
            # A query that may attend to nothing gets zeros, and has weights of zero in backward.
            share = weights.sum(-1, keepdim=True).reciprocal_().nan_to_num_(posinf=0.0)
            found = weights @ _by_head(value[samples, rows], wide)
            out[part] = found.mul_(share).transpose(2, 3).to(out.dtype)
            most[samples, rows, :, queries], inverse[samples, rows, :, queries] = top, share
        ctx.save_for_backward(query, key, value, out, most, inverse, *biases)
        return out

    @staticmethod
    @once_differentiable
    @_in_its_dtypes
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, most, inverse, *biases = ctx.saved_tensors
        wide = most.dtype
        # Where several parts add to a gradient it is summed in the wide dtype: keys and values only if queries are cut.
        cut = _steps(query.shape, key.shape[2])[1] < query.shape[2]
        grad_query = torch.empty_like(query)
        grad_key, grad_value = (torch.zeros_like(each, dtype=wide if cut else each.dtype) for each in (key, value))
        wanted = ctx.needs_input_grad[3:]
        grad_biases = [
            torch.zeros_like(bias, dtype=wide) if asked else None for bias, asked in zip(biases, wanted, strict=True)
        ]
        scale = 1 / math.sqrt(query.shape[-1])
        for part in _parts(query.shape, key.shape[2]):
            samples, rows, queries = part
            q, k, v = (_by_head(each, wide) for each in (query[part], key[samples, rows], value[samples, rows]))
            g, o = _by_head(grad[part], wide), _by_head(out[part], wide)
            weights = _scores(q, k, biases, part).sub_(most[samples, rows, :, queries]).exp_()
            weights.mul_(inverse[samples, rows, :, queries])
            grad_value[samples, rows] += (weights.transpose(-2, -1) @ g).transpose(2, 3)
            grad_scores = (g @ v.transpose(-2, -1)).sub_((g * o).sum(-1, keepdim=True)).mul_(weights)
            for total in grad_biases:
                if total is not None:
                    own = _of_part(total, part)
                    own += grad_scores.sum_to_size(own.shape)
            grad_query[part] = (grad_scores @ k).mul_(scale).transpose(2, 3).to(query.dtype)
            grad_key[samples, rows] += (grad_scores.transpose(-2, -1) @ q).mul_(scale).transpose(2, 3)
        return (
            grad_query,
            grad_key.to(key.dtype),
            grad_value.to(value.dtype),
            *(None if total is None else total.to(bias.dtype) for total, bias in zip(grad_biases, biases, strict=True)),
        )


class _TiledAttention(torch.autograd.Function):
    """The kernels."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, pairs: Tensor | None
    ) -> Tensor:
        from deepspeed.ops.kernels import evoformer as kernels

        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        mask, pairs = (None if bias is None else bias.contiguous() for bias in (mask, pairs))
        out, *sums = kernels.forward(query, key, value, mask, pairs)
        ctx.save_for_backward(query, key, value, out, *sums, mask, pairs)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from deepspeed.ops.kernels import evoformer as kernels

        *saved, mask, pairs = ctx.saved_tensors
        found = kernels.backward(tuple(saved), mask, pairs, grad.contiguous(), ctx.needs_input_grad[3:])
        like = (*saved[:3], mask, pairs)
        return tuple(
            None if each is None or other is None else each.to(other.dtype)
            for each, other in zip(found, like, strict=True)
        )


@reference("evoformer_attention")
def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, pairs: Tensor | None) -> Tensor:
    """softmax(Q·Kᵀ/√d + mask + pairs)·V of checked tensors."""
    biases = [bias for bias in (mask, pairs) if bias is not None]
    out: Tensor = _EvoformerAttention.apply(query, key, value, *biases)  # type: ignore[no-untyped-call]
    return out


@by_triton("evoformer_attention")
def attend_in_tiles(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, pairs: Tensor | None) -> Tensor:
    """The same by kernels, where they take the tensors."""
    alike = query.dtype == key.dtype == value.dtype
    if not (alike and takes(query) and query.shape[-1] <= _WIDEST):
        return attend(query, key, value, mask, pairs)
    out: Tensor = _TiledAttention.apply(query, key, value, mask, pairs)  # type: ignore[no-untyped-call]
    return out


def DS4Sci_EvoformerAttention(Q: Tensor, K: Tensor, V: Tensor, biases: Sequence[Tensor | None]) -> Tensor:
    """Attention of [samples, rows, tokens, heads, d] in fp32, fp16 or bf16, with up to two biases.

    The first is [samples, rows, 1, 1, keys], the second [samples, 1, heads, queries, keys]; either may be None.
    """
    if Q.dim() != 5 or K.shape != V.shape or K.dim() != 5 or any(Q.shape[dim] != K.shape[dim] for dim in (0, 1, 3, 4)):
        raise UsageError(
            f"Q, K and V have shapes {tuple(Q.shape)}, {tuple(K.shape)} and {tuple(V.shape)}; expected [samples, rows, "
            "tokens, heads, d], with equal tokens in K and V"
        )
    samples, rows, queries, heads = Q.shape[:4]
    keys = K.shape[2]
    shapes = ((samples, rows, 1, 1, keys), (samples, 1, heads, queries, keys))
    if len(biases) > len(shapes):
        raise UsageError(f"{len(biases)} biases are given; expected at most 2: one of keys and one of pairs")
    for number, (bias, shape) in enumerate(zip(biases, shapes, strict=False), 1):
        if bias is not None and tuple(bias.shape) != shape:
            raise UsageError(f"bias {number} has shape {tuple(bias.shape)}; expected {shape}, by Q and K")
    out: Tensor = op("evoformer_attention")(Q, K, V, *biases, *(None,) * (len(shapes) - len(biases)))
    return out
