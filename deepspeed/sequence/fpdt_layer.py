"""FPDT: a transformer layer's parts over chunks of a sequence that ranks share, for models in Megatron's layout.

The whole sequence is cut into chunks, and each chunk into parts side by side, one per rank (`FPDT_InputConstruct`); a
rank's part is its parts of all chunks, one after the other. So an all-to-all of a rank's i-th part gives all ranks the
i-th chunk, with some heads each, and chunks can be computed and put aside in the order of the sequence.

[Note: a chain of chunks]
Each chunk is a node of autograd's graph of its own, so that on the device there is one chunk of queries, and one of
keys and values at a time, beside the next that is on its way. A chunk's queries see its own keys and those of all
chunks before it. In backward the last chunk comes first: it adds to the gradients of all keys before it, and a chunk's
own gradient is complete when its turn comes. An empty tensor goes from node to node, so that this is the order on every
rank whatever autograd would choose.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import UsageError
from deepspeed.memory.streaming import CopyStream, PendingCopy, copy_stream_for
from deepspeed.sequence import block_attention
from deepspeed.sequence.block_attention import AttentionBlock
from deepspeed.sequence.exchange import gather_heads, head_plan, of_all_ranks, scatter_queries_keys_values
from deepspeed.sequence.layer import apply_rotary_pos_emb


class _Chunk:
    """A tensor in host memory, and on the device from `load` to `drop`: a part of a sequence that waits for its use.

    Values come back along `copies`, beside what computes; they leave in the order of what computes.
    """

    def __init__(self, chunk: Tensor, copies: CopyStream) -> None:
        self.dtype, self._shape, self._device = chunk.dtype, chunk.shape, chunk.device
        self._host = get_accelerator().pin_empty(chunk.shape, dtype=chunk.dtype)
        self._host.copy_(chunk.detach(), non_blocking=True)
        self._copies = copies
        self._here: Tensor | None = None
        self._ticket: PendingCopy | None = None

    def load(self) -> None:
        """Begin to bring the values to the device; nothing where they are there."""
        if self._here is None:
            self._here = torch.empty(self._shape, dtype=self.dtype, device=self._device)
            self._ticket = self._copies.copy(self._here, self._host)

    def value(self) -> Tensor:
        """The values on the device."""
        self._arrive()
        assert self._here is not None, "loaded before"
        return self._here

    def drop(self) -> None:
        """Let go of the device's memory; what was changed there since is lost, unless it was written back."""
        self._arrive()
        self._here = None

    def write_back(self) -> None:
        """Write the values of the device back to host memory."""
        self._host.copy_(self.value().detach(), non_blocking=True)

    def _arrive(self) -> None:
        if self._ticket is not None:
            self._ticket.join()
            self._ticket = None


class _Here(_Chunk):
    """A chunk that stays on the device."""

    def __init__(self, chunk: Tensor) -> None:
        self.dtype, self._here, self._ticket = chunk.dtype, chunk.detach(), None

    def drop(self) -> None:
        """It stays."""

    def write_back(self) -> None:
        """It is where it belongs."""


def _in_turn(groups: Iterable[tuple[_Chunk, ...]]) -> Iterator[tuple[Tensor, ...]]:
    """The values of some chunks after those of others; the next ones come while these are used."""
    waiting: tuple[_Chunk, ...] | None = None
    for group in (*groups, None):
        for chunk in group or ():
            chunk.load()
        if waiting is not None:
            yield tuple(chunk.value() for chunk in waiting)
            for chunk in waiting:
                chunk.drop()
        waiting = group


@dataclass
class _Keys:
    """Keys and values of a chunk, and what later chunks have added to their gradients."""

    key: _Chunk
    value: _Chunk
    grads: tuple[_Chunk, _Chunk] | None = None


class _Kept:
    """What chunks leave behind for later ones and for backward. It knows nothing of the graph, which knows it."""

    def __init__(self, scale: float, copies: CopyStream, offload: bool) -> None:
        self.scale, self.offload, self._copies = scale, offload, copies
        self.seen: list[_Keys] = []

    def keep(self, tensor: Tensor) -> _Chunk:
        """A tensor until it is used again."""
        return _Chunk(tensor, self._copies) if self.offload else _Here(tensor)

    def add(self, keys: _Keys, found: tuple[Tensor, Tensor]) -> None:
        """Add to the gradients of earlier keys and values, in float32."""
        if keys.grads is None:
            keys.grads = self.keep(found[0].float()), self.keep(found[1].float())
            return
        for kept, more in zip(keys.grads, found, strict=True):
            kept.load()
            kept.value().add_(more)
            kept.write_back()
            kept.drop()


class ChunkedAttention:
    """The attention of one sequence; see [Note: a chain of chunks]. Tensors are [batch, heads, chunk, width]."""

    def __init__(self, scale: float, device: torch.device, *, offload: bool) -> None:
        self._kept = _Kept(scale, copy_stream_for(device), offload)
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
        found, lse = block_attention.forward(query, key, value, AttentionBlock(chunks.scale, causal=True))
        out = found.float()
        for earlier in _in_turn((keys.key, keys.value) for keys in chunks.seen):
            out, lse = block_attention.merge(
                out, lse, *block_attention.forward(query, earlier[0], earlier[1], AttentionBlock(chunks.scale))
            )
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
        ((query, out, lse),) = _in_turn([ctx.kept])
        (own,) = _in_turn([(keys.key, keys.value)])
        found = block_attention.backward(
            flow, (query, own[0], own[1]), out, lse, AttentionBlock(chunks.scale, causal=True)
        )
        query_grad = found[0].float()
        chunks.add(keys, found[1:])
        earlier = chunks.seen[: ctx.number]
        for each, held in zip(earlier, _in_turn((e.key, e.value) for e in earlier), strict=True):
            found = block_attention.backward(flow, (query, held[0], held[1]), out, lse, AttentionBlock(chunks.scale))
            query_grad += found[0]
            chunks.add(each, found[1:])
        return query_grad.to(query.dtype), *_taken(keys), None, None


def _taken(keys: _Keys) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of keys and values, which are complete; they are forgotten, for another backward."""
    if keys.grads is None:
        return None, None
    ((key, value),) = _in_turn([keys.grads])
    keys.grads = None
    return key.to(keys.key.dtype), value.to(keys.value.dtype)


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
        ((inputs,),) = _in_turn([(ctx.kept,)])
        return to_inputs, grads[0].flatten(0, -2).t().matmul(inputs.flatten(0, -2)), None


def joined(chunks: Iterable[Tensor], length: int) -> Tensor:
    """The chunks one after the other along their first dim, `length` in all; each is written as it comes."""
    whole: Tensor | None = None
    begin = 0
    for chunk in chunks:
        if whole is None:
            whole = chunk.new_empty(length, *chunk.shape[1:])
        whole = _Put.apply(whole, chunk, begin)  # type: ignore[no-untyped-call]
        begin += chunk.shape[0]
        del chunk  # before the next is made
    assert whole is not None, "there are no chunks"
    assert begin == length, f"chunks of {begin} for a length of {length}"
    return whole


class _Put(torch.autograd.Function):
    """Writes into memory that nobody has read, so that its gradient goes through as it is, without a copy."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, chunk: Tensor, begin: int) -> Tensor:
        ctx.rows = slice(begin, begin + chunk.shape[0])
        whole[ctx.rows] = chunk
        ctx.mark_dirty(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], grads[0][ctx.rows], None


class FPDT_Attention(nn.Module):
    """Projections and causal attention, chunk by chunk: Ulysses over ranks, and what waits is in host memory.

    `first_weight` gives queries, then keys, then values; `config` tells `hidden_size`, `num_attention_heads`,
    `num_key_value_heads` and `kv_channels` (or `head_dim`). `chunk_size` counts tokens of the whole sequence.
    """

    def __init__(
        self,
        config: Any,
        first_weight: Tensor,
        first_bias: Tensor | None,
        second_weight: Tensor,
        second_bias: Tensor | None,
        sequence_process_group: ProcessGroup,
        gather_idx: int = 0,
        scatter_idx: int = 2,
        return_bias: bool = True,
        chunk_size: int = 65536,
        enable_offloading: bool = True,
    ) -> None:
        super().__init__()
        if (gather_idx, scatter_idx) != (0, 2):
            raise UsageError(
                f"FPDT_Attention got gather_idx {gather_idx} and scatter_idx {scatter_idx}; hidden states are "
                "[part, batch, hidden], so that only 0 and 2 are possible. Leave them out."
            )
        if getattr(config, "attention_dropout", 0):
            raise UsageError(
                f"FPDT_Attention has no dropout of scores; config.attention_dropout is {config.attention_dropout}. Set "
                "it to 0."
            )
        heads = config.num_attention_heads
        told = getattr(config, "kv_channels", None) or getattr(config, "head_dim", None)
        self.width = told or config.hidden_size // heads
        self.heads, self.key_heads = heads, getattr(config, "num_key_value_heads", None) or heads
        self.qkv_linear_weight, self.qkv_linear_bias = first_weight, first_bias
        self.qkv_dense_weight, self.qkv_dense_bias = second_weight, second_bias
        self.spg, self.return_bias = sequence_process_group, return_bias
        self.chunk_size, self.enable_offloading = chunk_size, enable_offloading
        self.plan = head_plan(self.heads, self.key_heads, sequence_process_group.size())
        rows = (self.heads + 2 * self.key_heads) * self.width
        if first_weight.shape[0] not in (0, rows):  # 0: sharded by ZeRO
            raise UsageError(
                f"first_weight has {first_weight.shape[0]} rows; the heads of the config need {rows}: queries, keys, "
                "values."
            )

    def forward(
        self,
        layernorm_output: Tensor,
        attention_mask: Tensor | None = None,
        inference_params: Any = None,
        rotary_pos_emb: tuple[Tensor, Tensor] | None = None,
        cpu_offloading: bool = True,
    ) -> Any:
        """[part, batch, hidden] of [part, batch, hidden], with the second bias beside it, or added.

        `rotary_pos_emb` are cos and sin of the whole sequence, [length, 1, 1, width]. Attention is causal; a mask of
        four dims without a batch, as Megatron makes for that, is taken for it.
        """
        if inference_params is not None:
            raise UsageError("FPDT_Attention trains; it takes no inference_params.")
        if attention_mask is not None and (attention_mask.dim() != 4 or attention_mask.shape[0] != 1):
            raise UsageError(
                f"FPDT_Attention got a mask of shape {tuple(attention_mask.shape)}; its attention is causal and has no "
                "padding. Pass None."
            )
        offload = self.enable_offloading and cpu_offloading
        chunks = ChunkedAttention(self.width**-0.5, layernorm_output.device, offload=offload)
        part = _part_of(layernorm_output.shape[0], self.spg.size(), self.chunk_size)
        results = self._results(layernorm_output.split(part), rotary_pos_emb, chunks)
        out = joined(results, layernorm_output.shape[0])
        if self.return_bias:
            return out, self.qkv_dense_bias
        return out if self.qkv_dense_bias is None else out + self.qkv_dense_bias

    def _results(
        self, parts: Iterable[Tensor], rotary_pos_emb: tuple[Tensor, Tensor] | None, chunks: ChunkedAttention
    ) -> Iterator[Tensor]:
        """Of one chunk after the other."""
        begin = 0
        for hidden in parts:
            end = begin + hidden.shape[0] * self.spg.size()
            turns = None if rotary_pos_emb is None else tuple(each[begin:end] for each in rotary_pos_emb)
            yield self._chunk(hidden, turns, chunks)
            begin = end

    def _chunk(self, hidden: Tensor, turns: tuple[Tensor, ...] | None, chunks: ChunkedAttention) -> Tensor:
        """One chunk, [part of it, batch, hidden]."""
        sizes = [count * self.width for count in (self.heads, self.key_heads, self.key_heads)]
        projected = F.linear(hidden, self.qkv_linear_weight, self.qkv_linear_bias).transpose(0, 1).split(sizes, -1)
        query, key, value = (each.unflatten(-1, (-1, self.width)) for each in projected)
        query, key, value = scatter_queries_keys_values((query, key, value), self.plan, self.spg)
        if turns is not None:
            cos, sin = (each.permute(1, 0, 2, 3) for each in turns)
            query, key = apply_rotary_pos_emb(query, cos, sin), apply_rotary_pos_emb(key, cos, sin)
        out = chunks(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)).transpose(1, 2)
        whole = gather_heads(out, self.plan.queries, self.spg)
        return chunks.product(whole.flatten(2).transpose(0, 1).contiguous(), self.qkv_dense_weight)


class FPDT_FFN:
    """A perceptron with GELU over chunks, whose inside exists for one chunk."""

    @staticmethod
    def apply(
        x: Tensor,
        w1: Tensor,
        b1: Tensor | None,
        w2: Tensor,
        b2: Tensor | None,
        add_bias: bool,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor | None]:
        """(output, bias) of [length, batch, hidden]: the second bias is added with `add_bias`, else beside it."""

        def inside(part: Tensor) -> Tensor:
            return F.linear(F.gelu(F.linear(part, w1, b1), approximate="tanh"), w2, b2 if add_bias else None)

        parts = (checkpoint(inside, part, use_reentrant=False) for part in x.split(max(1, chunk_size)))
        return joined(parts, x.shape[0]), None if add_bias else b2


class FPDT_LogitsLoss:
    """Logits and loss of every token over chunks, of which the logits exist for one."""

    @staticmethod
    def apply(
        lm_output: Tensor,
        labels: Tensor,
        logit_weights: Tensor,
        rank: int,
        spg_size: int,
        spg: ProcessGroup,
        num_chunk: int,
    ) -> Tensor:
        """The losses of all ranks' tokens, one rank after the other, [length, batch]; the gradient is this rank's part.

        `lm_output` is [part, batch, hidden], `labels` are [batch, part].
        """
        if (rank, spg_size) != (spg.rank(), spg.size()):
            raise UsageError(
                f"FPDT_LogitsLoss got rank {rank} of {spg_size}, but is rank {spg.rank()} of {spg.size()} in its group."
            )

        def inside(hidden: Tensor, wanted: Tensor) -> Tensor:
            logits = F.linear(hidden, logit_weights).float().flatten(0, 1)
            return F.cross_entropy(logits, wanted.flatten(), reduction="none").view(wanted.shape)

        size = max(1, -(-lm_output.shape[0] // num_chunk))
        parts = zip(lm_output.split(size), labels.t().split(size), strict=True)
        losses = torch.cat([checkpoint(inside, *part, use_reentrant=False) for part in parts])
        others = of_all_ranks(losses.detach()[None], [len(losses)] * spg_size, spg)[0].chunk(spg_size)
        return torch.cat([*others[:rank], losses, *others[rank + 1 :]])


class FPDT_InputConstruct(nn.Module):
    """This rank's part of a batch of whole sequences, [batch, length], in the order of chunks."""

    def __init__(
        self,
        tokens: Tensor,
        labels: Tensor | None,
        loss_mask: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        args: Any,
        sp_size: int,
        sp_rank: int,
    ) -> None:
        """`args.ds_sequence_parallel_fpdt_chunk_size` counts tokens of the whole sequence, as `chunk_size` does."""
        super().__init__()
        chunk, length = args.ds_sequence_parallel_fpdt_chunk_size, tokens.shape[1]
        if length % sp_size or length % chunk or chunk % sp_size:
            raise UsageError(
                f"a sequence of {length} tokens cannot be cut into chunks of {chunk} (ds_sequence_parallel_fpdt_"
                f"chunk_size) of which {sp_size} sequence-parallel ranks hold a part each: {sp_size} must divide "
                f"{chunk}, and {chunk} must divide {length}. Pad it."
            )
        self.tokens, self.labels, self.loss_mask = tokens, labels, loss_mask
        self.attention_mask, self.position_ids = attention_mask, position_ids
        self.chunk_size, self.sp_size, self.sp_rank = chunk // sp_size, sp_size, sp_rank

    def generate(self) -> tuple[Tensor | None, ...]:
        """(tokens, labels, loss_mask, attention_mask, position_ids) of this rank's tokens.

        The attention mask stays as it is; the loss mask is that of all tokens, in the order of `FPDT_LogitsLoss`.
        """
        tokens, labels, positions = (
            None if each is None else self._ordered(each)[:, self.sp_rank].contiguous()
            for each in (self.tokens, self.labels, self.position_ids)
        )
        mask = None if self.loss_mask is None else self._ordered(self.loss_mask).flatten(1, 2)
        return tokens, labels, mask, self.attention_mask, positions

    def _ordered(self, whole: Tensor) -> Tensor:
        """[batch, ranks, tokens of each] of [batch, length]."""
        pieces: Tensor = whole.unflatten(1, (-1, self.sp_size, self.chunk_size))
        return pieces.transpose(1, 2).flatten(2)


def _part_of(length: int, ranks: int, chunk: int) -> int:
    """Tokens of a rank's part of a chunk; a sequence that is shorter than one is one."""
    part = max(1, chunk // ranks)
    if chunk % ranks or (length > part and length % part):
        raise UsageError(
            f"{length} tokens on each of {ranks} sequence-parallel ranks cannot be cut into chunks of {chunk}: "
            f"{ranks} must divide {chunk}, and {chunk} must divide {length * ranks}. Choose another chunk_size."
        )
    return part
