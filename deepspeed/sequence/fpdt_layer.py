"""FPDT: a transformer layer's parts over chunks of a sequence that ranks share, for models in Megatron's layout.

The whole sequence is cut into chunks, and each chunk into parts side by side, one per rank (`FPDT_InputConstruct`); a
rank's part is its parts of all chunks, one after the other. So an all-to-all of a rank's i-th part gives all ranks the
i-th chunk, with some heads each, and chunks can be computed and put aside in the order of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from deepspeed.errors import UsageError
from deepspeed.sequence.chunked import ChunkedAttention
from deepspeed.sequence.exchange import gather_heads, of_all_ranks, scatter_queries_keys_values
from deepspeed.sequence.heads import head_plan
from deepspeed.sequence.joined import joined
from deepspeed.sequence.layer import apply_rotary_pos_emb

__all__ = [
    "FPDT_FFN",
    "FPDT_Attention",
    "FPDT_InputConstruct",
    "FPDT_LogitsLoss",
]


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
        _check_rows(first_weight, (self.heads + 2 * self.key_heads) * self.width)

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


def _check_rows(weight: Tensor, expected: int) -> None:
    if weight.shape[0] not in (0, expected):  # 0: sharded by ZeRO
        raise UsageError(
            f"first_weight has {weight.shape[0]} rows; the heads of the config need {expected}: queries, keys, values."
        )
