"""`DistributedAttention`: any attention over whole sequences, of which every rank has a part (Ulysses)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import UsageError
from deepspeed.sequence.exchange import (
    HeadPlan,
    gather_heads,
    head_plan,
    lengths_of_ranks,
    padded,
    padded_parts,
    scatter_queries_keys_values,
    unpadded,
)


class DistributedAttention(nn.Module):
    """Runs `local_attention` on whole sequences with this rank's share of the heads.

    Inputs and output are this rank's part of the sequence with all heads: [batch, part, heads, width] with
    `batch_dim_idx` 0, [part, batch, heads, width] with 1. Head counts need not be multiples of the number of ranks.

    Parts of other lengths are padded on their way; the local attention sees no padding. On a CPU ranks compare lengths
    in every forward. On a device, where the host waits for it, they do only if those of the first forward differ.
    """

    def __init__(
        self,
        local_attention: nn.Module | Callable[..., Tensor],
        sequence_process_group: ProcessGroup,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        """`num_kv_heads` is needed only where it differs from the heads of `key`; exchanges run on `sp_stream`."""
        super().__init__()
        _check_dims(scatter_idx, gather_idx)
        if scatter_idx < gather_idx:
            raise UsageError(
                f"DistributedAttention got scatter_idx {scatter_idx} and gather_idx {gather_idx}; queries scatter "
                "their heads (dim 2) and gather the sequence (dim 0 or 1). Swap them."
            )
        self.local_attn = local_attention
        self.spg = sequence_process_group
        self.scatter_idx = scatter_idx
        self.gather_idx = gather_idx
        self.sp_stream = sp_stream
        self.num_kv_heads = num_kv_heads
        self._equal_parts: bool | None = None
        """Whether the parts of all ranks were equally long in the first forward; stays None on a CPU."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: tuple[Tensor, Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """The output of the local attention, for this rank's part; `rotary_pos_emb` is that of the whole sequence."""
        plan = self._plan(query, key, value)
        tensors = tuple(_batch_first(tensor, batch_dim_idx) for tensor in (query, key, value))
        lengths = self._lengths(tensors)
        given = tuple(padded(tensor, max(each)) for tensor, each in zip(tensors, lengths, strict=True))
        scattered = self._scatter(given, plan)
        q, k, v = (_batch_first(unpadded(*pair), batch_dim_idx) for pair in zip(scattered, lengths, strict=True))
        if rotary_pos_emb is not None:
            cos, sin = (part if batch_dim_idx else part.permute(1, 0, 2, 3) for part in rotary_pos_emb)
            q, k = apply_rotary_pos_emb(q, cos, sin), apply_rotary_pos_emb(k, cos, sin)
        context = _batch_first(self.local_attn(q, k, v, *args, **kwargs), batch_dim_idx)
        out = gather_heads(padded_parts(context, lengths[0]), plan.queries, self.spg)
        own = tensors[0].shape[1]
        return _batch_first(out if out.shape[1] == own else out[:, :own], batch_dim_idx)

    def _lengths(self, tensors: tuple[Tensor, ...]) -> list[list[int]]:
        """The lengths of all ranks' parts of each tensor, [batch, part, heads, width]."""
        size = self.spg.size()
        if self._equal_parts or size == 1:
            return [[tensor.shape[1]] * size for tensor in tensors]
        lengths = lengths_of_ranks(tensors, self.spg)
        if self._equal_parts is None and tensors[0].device.type != "cpu":
            self._equal_parts = all(min(each) == max(each) for each in lengths)
        return lengths

    def _plan(self, query: Tensor, key: Tensor, value: Tensor) -> HeadPlan:
        if not query.dim() == key.dim() == value.dim() == 4:
            shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
            raise UsageError(
                f"DistributedAttention got the shapes {shapes}; expected four dims, [batch, sequence, heads, width] or "
                "[sequence, batch, heads, width]."
            )
        if self.num_kv_heads is not None and self.num_kv_heads != key.shape[2]:
            raise UsageError(
                f"num_kv_heads is {self.num_kv_heads}, but the keys have {key.shape[2]} heads. Pass the number of "
                "heads that key and value have on their way in, or leave it out."
            )
        return head_plan(query.shape[2], key.shape[2], self.spg.size())

    def _scatter(self, tensors: tuple[Tensor, ...], plan: HeadPlan) -> tuple[Tensor, ...]:
        query, key, value = tensors
        if self.sp_stream is None:
            return scatter_queries_keys_values((query, key, value), plan, self.spg)
        accelerator = get_accelerator()
        here = accelerator.current_stream()
        self.sp_stream.wait_stream(here)
        with accelerator.stream(self.sp_stream):
            found = scatter_queries_keys_values((query, key, value), plan, self.spg)
        here.wait_stream(self.sp_stream)
        for tensor in tensors:
            tensor.record_stream(self.sp_stream)
        for tensor in found:
            tensor.record_stream(here)
        return found


def apply_rotary_pos_emb(t: Tensor, freqs_cos: Tensor, freqs_sin: Tensor) -> Tensor:
    """Rotate the first dims of every head, as many as there are frequencies."""
    width = freqs_cos.shape[-1]
    turned, kept = t[..., :width], t[..., width:]
    front, back = turned.chunk(2, -1)
    turned = turned * freqs_cos.to(t.dtype) + torch.cat([-back, front], -1) * freqs_sin.to(t.dtype)
    return torch.cat([turned, kept], -1) if kept.shape[-1] else turned


def _check_dims(scatter_idx: int, gather_idx: int) -> None:
    if (scatter_idx >= 2) == (gather_idx >= 2):
        raise UsageError(
            f"scatter_idx is {scatter_idx} and gather_idx is {gather_idx}; one must be the dim of the heads, 2, and "
            "the other that of the sequence, 0 or 1."
        )


def _batch_first(tensor: Tensor, batch_dim: int) -> Tensor:
    """From the caller's order of dims to batch first, and back."""
    if batch_dim not in (0, 1):
        raise UsageError(
            f"batch_dim_idx is {batch_dim}; expected 0 ([batch, sequence, …]) or 1 ([sequence, batch, …])."
        )
    return tensor.transpose(0, 1) if batch_dim == 1 else tensor
