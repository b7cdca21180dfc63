"""Causal attention over chunks of a sequence that come one after the other; what waits, waits in host memory.

[Note: a chain of chunks]
Each chunk is a node of autograd's graph of its own, so that on the device there is one chunk of queries, and one of
keys and values at a time, beside the next that is on its way. A chunk's queries see its own keys and those of all
chunks before it. In backward the last chunk comes first: it adds to the gradients of all keys before it, and a chunk's
own gradient is complete when its turn comes. An empty tensor goes from node to node, so that this is the order on every
rank whatever autograd would choose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.memory.lane import Lane, lane_for
from deepspeed.sequence import blocks
from deepspeed.sequence.blocks import Block
from deepspeed.sequence.chunks import SequenceChunk, in_turn

__all__ = ["ChunkedAttention"]


class _Here(SequenceChunk):
    """A chunk that stays on the device."""

    def __init__(self, chunk: Tensor) -> None:
        self.chunk_shape, self.chunk_dtype, self.device = chunk.shape, chunk.dtype, chunk.device
        self.gpu_chunk, self._ticket = chunk.detach(), None

    def offload(self) -> None:
        """It stays."""

    def overwrite_to_cpu(self) -> None:
        """It is where it belongs."""


@dataclass
class _Keys:
    """Keys and values of a chunk, and what later chunks have added to their gradients."""

    key: SequenceChunk
    value: SequenceChunk
    grads: tuple[SequenceChunk, SequenceChunk] | None = None


class _Kept:
    """What chunks leave behind for later ones and for backward. It knows nothing of the graph, which knows it."""

    def __init__(self, scale: float, lane: Lane, offload: bool) -> None:
        self.scale, self.offload, self._lane = scale, offload, lane
        self.seen: list[_Keys] = []

    def keep(self, tensor: Tensor) -> SequenceChunk:
        """A tensor until it is used again."""
        return SequenceChunk(tensor, lane=self._lane) if self.offload else _Here(tensor)

    def add(self, keys: _Keys, found: tuple[Tensor, Tensor]) -> None:
        """Add to the gradients of earlier keys and values, in float32."""
        if keys.grads is None:
            keys.grads = self.keep(found[0].float()), self.keep(found[1].float())
            return
        for kept, more in zip(keys.grads, found, strict=True):
            kept.load_to_gpu()
            kept.get_gpu_chunk().add_(more)
            kept.overwrite_to_cpu()
            kept.offload()


class ChunkedAttention:
    """The attention of one sequence; see [Note: a chain of chunks]. Tensors are [batch, heads, chunk, width]."""

    def __init__(self, scale: float, device: torch.device, *, offload: bool) -> None:
        self._kept = _Kept(scale, lane_for(device), offload)
        self._token = torch.empty(0, device=device)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The result for the next chunk; keys and values may have fewer heads than queries."""
        found: tuple[Tensor, Tensor] = _Attend.apply(query, key, value, self._token, self._kept)  # type: ignore[no-untyped-call]
        out, self._token = found
        return out

    def product(self, inputs: Tensor, weight: Tensor) -> Tensor:
        """`linear` whose input waits for backward as the chunks do."""
        if torch.is_autocast_enabled(inputs.device.type):
            dtype = torch.get_autocast_dtype(inputs.device.type)
            inputs, weight = inputs.to(dtype), weight.to(dtype)
        return _Product.apply(inputs, weight, self._kept)  # type: ignore[no-any-return, no-untyped-call]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, token: Tensor, chunks: _Kept
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        found, lse = blocks.forward(query, key, value, Block(chunks.scale, causal=True))
        out = found.float()
        for earlier in in_turn((keys.key, keys.value) for keys in chunks.seen):
            out, lse = blocks.merge(out, lse, *blocks.forward(query, earlier[0], earlier[1], Block(chunks.scale)))
        result = out.to(query.dtype)
        ctx.number, ctx.chunks = len(chunks.seen), chunks
        chunks.seen.append(_Keys(chunks.keep(key), chunks.keep(value)))
        ctx.kept = tuple(map(chunks.keep, (query, result, lse))) if any(ctx.needs_input_grad) else ()
        return result, token.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        flow, chunks = grads[0], ctx.chunks
        keys: _Keys = chunks.seen[ctx.number]
        if flow is None:  # a chunk that the loss does not look at; later ones may have looked at its keys
            return None, *_taken(keys), None, None
        flow = flow.contiguous()
        ((query, out, lse),) = in_turn([ctx.kept])
        (own,) = in_turn([(keys.key, keys.value)])
        found = blocks.backward(flow, (query, own[0], own[1]), out, lse, Block(chunks.scale, causal=True))
        query_grad = found[0].float()
        chunks.add(keys, found[1:])
        earlier = chunks.seen[: ctx.number]
        for each, held in zip(earlier, in_turn((e.key, e.value) for e in earlier), strict=True):
            found = blocks.backward(flow, (query, held[0], held[1]), out, lse, Block(chunks.scale))
            query_grad += found[0]
            chunks.add(each, found[1:])
        return query_grad.to(query.dtype), *_taken(keys), None, None


def _taken(keys: _Keys) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of keys and values, which are complete; they are forgotten, for another backward."""
    if keys.grads is None:
        return None, None
    ((key, value),) = in_turn([keys.grads])
    keys.grads = None
    return key.to(keys.key.chunk_dtype), value.to(keys.value.chunk_dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, chunks: _Kept) -> Tensor:
        ctx.kept = chunks.keep(inputs) if any(ctx.needs_input_grad) else None
        ctx.save_for_backward(weight)
        return torch.nn.functional.linear(inputs, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (weight,) = ctx.saved_tensors
        to_inputs = grads[0].matmul(weight) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return to_inputs, None, None
        ((inputs,),) = in_turn([(ctx.kept,)])
        return to_inputs, grads[0].flatten(0, -2).t().matmul(inputs.flatten(0, -2)), None
