"""`UlyssesSPAttentionHF`: Ulysses around one of Transformers' attention functions, for models as they come."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.log import warn_once
from deepspeed.sequence import parallel_state
from deepspeed.sequence.attention import SequenceGroups, attend, core_options
from deepspeed.sequence.exchange import head_plan
from deepspeed.sequence.inputs import TokenOrder, shifted
from deepspeed.transformers.attention import (
    CoreAttention,
    Masks,
    SequenceInfo,
    core_attention,
    register_attention,
    text_config_of,
)


class UlyssesSPAttentionHF(nn.Module):
    """An attention function that gets a part of the sequence with all heads, and computes on all of it with some.

    Positions of packed sequences and padding (a mask [batch, part]) are gathered from all ranks, once for each mask
    object that a model hands to its layers.
    """

    def __init__(
        self,
        attn: Callable[..., Any],
        batch_size: int,
        attn_head_count: int,
        attn_head_size: int,
        kv_head_count: int,
        num_hidden_layers: int,
        process_group: ProcessGroup,
        seq_length_is_variable: bool = False,
        local_seq_length: int | None = None,
        global_seq_length: int | None = None,
        disable_in_eval: bool = False,
    ) -> None:
        """Lengths and `batch_size` are compared with what comes, unless `seq_length_is_variable`."""
        super().__init__()
        self.world_size = process_group.size()
        head_plan(attn_head_count, kv_head_count, self.world_size)
        self.core = attn if isinstance(attn, CoreAttention) else CoreAttention("given", attn)
        self.inner = self.core.function
        self.process_group = process_group
        self.batch_size, self.num_hidden_layers = batch_size, num_hidden_layers
        self.attn_head_count, self.attn_head_size, self.kv_head_count = attn_head_count, attn_head_size, kv_head_count
        self.seq_length_is_variable = seq_length_is_variable
        if local_seq_length is None and global_seq_length is not None:
            local_seq_length = global_seq_length // self.world_size
        self.local_seq_length, self.global_seq_length = local_seq_length, global_seq_length
        if global_seq_length is not None:
            TokenOrder(self.world_size, 1).check(global_seq_length)
        elif not seq_length_is_variable and local_seq_length is None:
            raise UsageError("give local_seq_length or global_seq_length, or set seq_length_is_variable to True.")
        self.disable_in_eval = disable_in_eval
        self.masks = Masks()

    def forward(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """What the attention function returns, for this rank's part; query is [batch, heads, part, width]."""
        if attention_mask is not None and attention_mask.dim() != 2:
            raise UsageError(
                f"an attention mask of shape {tuple(attention_mask.shape)} was found; under sequence parallelism it "
                "must be a padding mask, [batch, length]. Leave others out, and tell packed sequences by position_ids."
            )
        if self.disable_in_eval and not module.training:
            whole = self._known(attention_mask, kwargs.get("position_ids"), key, gathers=False)
            return self.core(module, query, key, value, whole, *args, **core_options(kwargs))
        self._check(query)
        whole = self._known(attention_mask, kwargs.get("position_ids"), key, gathers=True)
        ways = SequenceGroups(TokenOrder(self.world_size, 1), self.process_group)
        return attend(module, (query, key, value), self.core, ways, whole, *args, **kwargs)

    @classmethod
    def of_config(cls, config: Any, core: CoreAttention, group: ProcessGroup, **options: Any) -> UlyssesSPAttentionHF:
        """With the heads and layers of a text model's config; `options` are the other arguments."""
        heads = config.num_attention_heads
        return cls(
            attn=core,
            attn_head_count=heads,
            attn_head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
            kv_head_count=getattr(config, "num_key_value_heads", None) or heads,
            num_hidden_layers=config.num_hidden_layers,
            process_group=group,
            **options,
        )

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> Any:
        """Put Ulysses around an attention function of Transformers; returns an mpu for `deepspeed.initialize`.

        `model_name_or_path` is a model, its config, or where that is found. Models that are loaded with that
        `attn_implementation` use it from now on. None with a `sequence_parallel_size` of 1.
        """
        if sequence_parallel_size == 1:
            return None
        if max_length is not None:
            warn_once("max_length of register_with_transformers is the old name of seq_length; please use that")
            seq_length = max_length if seq_length is None else seq_length
        config = text_config_of(model_name_or_path, core_attn_implementation)
        comm.init_distributed()
        parallel_state.initialize_sequence_parallel(sequence_parallel_size)
        attention = cls.of_config(
            config,
            core_attention(core_attn_implementation),
            parallel_state.get_sequence_parallel_group(),
            batch_size=micro_batch_size,
            seq_length_is_variable=seq_length_is_variable,
            global_seq_length=seq_length,
            disable_in_eval=disable_in_eval,
        )
        register_attention(core_attn_implementation, attention, attention.masks)
        return sys.modules[parallel_state.__name__]

    def _check(self, query: Tensor) -> None:
        found = (query.shape[0], query.shape[2])
        expected = (self.batch_size, self.local_seq_length)
        if not self.seq_length_is_variable and found != expected:
            raise UsageError(
                f"rank {comm.get_rank()} got {found[0]} sequences of {found[1]} tokens, expected {expected[0]} of "
                f"{expected[1]}. Give every rank equal parts, or set seq_length_is_variable to True."
            )

    def _known(self, mask: Tensor | None, positions: Tensor | None, key: Tensor, *, gathers: bool) -> SequenceInfo:
        """What is known of the whole sequence by a mask; found out where that is new."""
        whole = self.masks.whole(mask)
        if whole is None:
            batch, length = key.shape[0], key.shape[2]
            if positions is not None and positions.shape[-1] != length:
                positions = None  # one token after many that are cached
            if positions is not None and positions.dim() == 2:
                positions = positions.expand(batch, length)
            if gathers:
                whole = self._gather(mask, positions, batch, length)
            else:
                whole = SequenceInfo.of(length, positions, mask)
            if mask is not None:
                self.masks.stands_for(mask, whole)
        return whole

    def _gather(self, mask: Tensor | None, positions: Tensor | None, batch: int, length: int) -> SequenceInfo:
        """One gather for positions and padding of all parts."""
        told = [tensor for tensor in (positions, mask) if tensor is not None]
        if not told:
            return SequenceInfo(length * self.world_size)
        part = torch.stack([tensor.long() for tensor in told], -1).contiguous()  # [batch, part, told]
        parts = part.new_empty(self.world_size * batch, *part.shape[1:])
        comm.all_gather_into_tensor(parts, part, group=self.process_group)
        joined = list(parts.unflatten(0, (self.world_size, batch)).transpose(0, 1).flatten(1, 2).unbind(-1))
        return SequenceInfo.of(
            length * self.world_size,
            None if positions is None else joined[0],
            None if mask is None else joined[-1].bool(),
        )


class UlyssesSPDataLoaderAdapter:
    """Gathers one batch from each sequence-parallel rank, then gives all of them this rank's part of each in turn.

    Every tensor [batch, length, …] is cut. `labels` become `shift_labels`, moved by one over the whole sequence;
    `position_ids` are added where there are none. The end comes when any rank's loader ends.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: ProcessGroup, sp_world_size: int, device: Any) -> None:
        self.dl = dl
        self.sp_rank = sp_rank
        self.sp_group = sp_group
        self.sp_world_size = sp_world_size
        self.device = device
        self.iter: Iterator[Any] = iter(())
        self.micro_batches: deque[dict[str, Any]] = deque()

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size

    def __getattr__(self, name: str) -> Any:
        if name == "dl":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self.dl, name)

    def __iter__(self) -> UlyssesSPDataLoaderAdapter:
        self.iter = iter(self.dl)
        self.micro_batches.clear()
        return self

    def __next__(self) -> dict[str, Any]:
        if not self.micro_batches:
            self.refill()
        return self.micro_batches.popleft()

    def refill(self) -> None:
        """Take the next batch of every rank."""
        batch = next(self.iter, None)
        if batch is not None:
            batch = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in batch.items()}
        batches: list[Any] = [None] * self.sp_world_size
        comm.all_gather_object(batches, batch, group=self.sp_group)
        if any(each is None for each in batches):
            raise StopIteration
        self.micro_batches.extend(map(self._part, batches))

    def _part(self, batch: dict[str, Any]) -> dict[str, Any]:
        ids = batch.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            found = "none" if ids is None else tuple(getattr(ids, "shape", ()))
            raise UsageError(f"a batch needs input_ids of shape [batch, length]; found {found}, keys {sorted(batch)}.")
        rows, length = ids.shape
        order = TokenOrder(self.sp_world_size, 1)
        order.check(length)
        whole = dict(batch)
        if whole.get("position_ids") is None:
            whole["position_ids"] = torch.arange(length).expand(rows, length)
        if "labels" in whole:
            labels = whole.pop("labels")
            if not isinstance(labels, Tensor) or labels.shape[:2] != ids.shape:
                raise UsageError(
                    f"a batch has input_ids of shape {tuple(ids.shape)} and labels of shape "
                    f"{tuple(getattr(labels, 'shape', ()))}; sequences that ranks share need a label for each token."
                )
            whole.setdefault("shift_labels", shifted(labels))
        mine = order.of_rank(length, self.sp_rank)
        return {key: self._cut(value, length, mine) for key, value in whole.items()}

    def _cut(self, value: Any, length: int, mine: Tensor) -> Any:
        if not isinstance(value, Tensor):
            return value
        fits = value.dim() >= 2 and value.shape[1] == length
        return (value[:, mine[0] : mine[-1] + 1].contiguous() if fits else value).to(self.device)
