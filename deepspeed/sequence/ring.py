"""Ring attention: keys and values travel from rank to rank while each rank's queries stay.

[Note: a round] In round j a rank has the keys of the rank j places before it. It first begins to pass them on, then
computes, then waits, so that the exchange takes place beside the computation. In backward the gradients of keys and
values travel a round behind them and come home after the last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.parallel import AxisGroup
from deepspeed.sequence import block_attention
from deepspeed.sequence.block_attention import AttentionBlock
from deepspeed.sequence.inputs import TokenOrder
from deepspeed.transformers.attention import SequenceInfo, attention_mask


@dataclass(frozen=True, eq=False)
class Ring:
    """How the ranks of a ring see each other's tokens."""

    axis: AxisGroup
    order: TokenOrder
    whole: SequenceInfo
    scale: float
    causal: bool
    window: int | None = None

    def meeting(self, source: int, query: Tensor, key: Tensor) -> tuple[slice, slice, AttentionBlock]:
        """Which of this rank's queries meet which keys of another rank, and how."""
        mine, half, device = self.axis.rank, key.shape[2] // 2, query.device
        rows, columns = slice(0, query.shape[2]), slice(0, key.shape[2])
        if self.causal and source < mine:
            columns = slice(0, half)  # their back piece lies behind both of ours
        elif self.causal and source > mine:
            rows = slice(half, query.shape[2])  # our front piece lies before both of theirs
        if self.whole.plain and self.window is None:
            return rows, columns, AttentionBlock(self.scale, self.causal and source == mine)
        queries = self.order.on_ring(self.whole.length, mine).to(device)[rows]
        keys = self.order.on_ring(self.whole.length, source).to(device)[columns]

        def mask(part: slice) -> Tensor:
            return attention_mask(self.whole, queries[part], keys, causal=self.causal, window=self.window)

        return rows, columns, AttentionBlock(self.scale, mask=mask)


def ring_attention(query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> Tensor:
    """Attention of this rank's queries to the whole sequence; tensors are [batch, heads, length, width]."""
    return _Ring.apply(query, key, value, ring)  # type: ignore[no-any-return, no-untyped-call]


class _Exchange:
    """Two tensors on their way to the next rank, two others on theirs from the one before."""

    def __init__(self, axis: AxisGroup, tensors: tuple[Tensor, Tensor]) -> None:
        after, before = axis.ranks[(axis.rank + 1) % axis.size], axis.ranks[axis.rank - 1]
        self._sent = tuple(tensor.contiguous() for tensor in tensors)  # alive until they are sent
        self._landed = (torch.empty_like(self._sent[0]), torch.empty_like(self._sent[1]))
        group = axis.group
        ops: list[torch.distributed.P2POp] = [comm.P2POp(comm.isend, tensor, after, group) for tensor in self._sent]
        ops += [comm.P2POp(comm.irecv, tensor, before, group) for tensor in self._landed]
        self._works = comm.batch_isend_irecv(ops)

    def wait(self) -> tuple[Tensor, Tensor]:
        """What came."""
        for work in self._works:
            work.wait()
        return self._landed


class _Ring(torch.autograd.Function):
    """See [Note: a round]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> Tensor:
        axis = ring.axis
        out = torch.zeros(*query.shape[:3], value.shape[3], dtype=torch.float32, device=query.device)
        lse = torch.full(query.shape[:3], -torch.inf, dtype=torch.float32, device=query.device)
        held = (key, value)
        for step in range(axis.size):
            source = (axis.rank - step) % axis.size
            coming = _Exchange(axis, held) if step + 1 < axis.size else None
            rows, columns, block = ring.meeting(source, query, key)
            found = block_attention.forward(query[:, :, rows], held[0][:, :, columns], held[1][:, :, columns], block)
            out[:, :, rows], lse[:, :, rows] = block_attention.merge(out[:, :, rows], lse[:, :, rows], *found)
            held = held if coming is None else coming.wait()
        result = out.to(query.dtype)
        ctx.ring = ring
        ctx.save_for_backward(query, key, value, result, lse)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        axis = ring.axis
        flow = grads[0].contiguous()
        query_grad = torch.zeros_like(query, dtype=torch.float32)
        held, exchange = (key, value), None
        for step in range(axis.size):
            source = (axis.rank - step) % axis.size
            coming = _Exchange(axis, held) if step + 1 < axis.size else None
            own = (torch.zeros_like(key, dtype=torch.float32), torch.zeros_like(value, dtype=torch.float32))
            rows, columns, block = ring.meeting(source, query, key)
            saved = (query[:, :, rows], held[0][:, :, columns], held[1][:, :, columns])
            found = block_attention.backward(flow[:, :, rows], saved, out[:, :, rows], lse[:, :, rows], block)
            query_grad[:, :, rows] += found[0]
            own[0][:, :, columns] += found[1]
            own[1][:, :, columns] += found[2]
            if exchange is not None:
                for mine, theirs in zip(own, exchange.wait(), strict=True):
                    mine += theirs
            exchange = _Exchange(axis, own)
            held = held if coming is None else coming.wait()
        assert exchange is not None, "a ring has at least one round"
        key_grad, value_grad = exchange.wait()
        return query_grad.to(query.dtype), key_grad.to(key.dtype), value_grad.to(value.dtype), None
