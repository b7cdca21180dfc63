"""Published pieces of a paged cache for scripts with schedules of their own: blocks, sequences, packed batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator
from deepspeed.config.inference import (
    AllocationMode,
    CacheMemoryConfig,
    DSStateManagerConfig,
    DtypeEnum,
    InferenceSection,
)
from deepspeed.config.model import PositiveCount, key
from deepspeed.errors import UsageError

__all__ = [
    "BaseSequenceDescriptor",
    "BlockedAllocator",
    "BlockedKVCache",
    "DSSequenceDescriptor",
    "DSStateManager",
    "KVCacheConfig",
    "KVCacheType",
    "PlaceholderSequenceDescriptor",
    "RaggedBatchWrapper",
    "split_kv",
]

Blocks = Iterable[int] | int | Tensor


class KVCacheType(Enum):
    """What a group of caches keeps of a sequence: everything, or the last tokens."""

    DENSE = "dense"
    LOCAL = "local"


class KVCacheConfig(InferenceSection):
    """One group of caches that share block tables."""

    type: KVCacheType = key(KVCacheType.DENSE, "What is kept of a sequence.")
    block_size: PositiveCount = key(128, "Number of tokens of a block.")
    num_allocation_groups: PositiveCount = key(1, "Number of tables of a sequence.")
    cache_shape: tuple[int, int, int] = key(..., "(caches, heads, width of a head).")
    cache_dtype: DtypeEnum = key(DtypeEnum.fp16, "Dtype of keys and values.")
    max_blocks_per_allocation_group: PositiveCount = key(64, "Blocks of one sequence in a table.")


def _numbers(blocks: Blocks) -> list[int]:
    return [int(block) for block in torch.as_tensor(blocks).flatten()]


class BlockedAllocator:
    """A free list of block numbers."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise UsageError(f"BlockedAllocator: num_blocks is {num_blocks}, expected at least 1")
        self._total = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    def allocate(self, num_blocks: int) -> Tensor:
        """Numbers of blocks that were free."""
        if num_blocks > len(self._free):
            raise UsageError(f"{num_blocks} blocks are asked for, {len(self._free)} of {self._total} are free")
        return torch.tensor([self._free.pop() for _ in range(num_blocks)], dtype=torch.int32)

    def free(self, blocks: Blocks) -> None:
        """Give blocks back; one that is free already is an error, and nothing changes."""
        given, held = _numbers(blocks), set(range(self._total)).difference(self._free)
        if len(held.intersection(given)) != len(given):
            raise UsageError(f"blocks {given} are not held, or are given back twice")
        self._free += reversed(given)

    @property
    def free_blocks(self) -> int:
        """How many are free."""
        return len(self._free)


class BlockedKVCache:
    """Blocks of keys and values of several groups of caches, and a copy of some in host memory."""

    def __init__(
        self,
        configs: Sequence[KVCacheConfig],
        memory_config: CacheMemoryConfig,
        mp_group: Any = None,
        offload: bool = False,
    ) -> None:
        device = torch.device(get_accelerator().current_device_name())
        shapes = [(each.block_size, 2, *each.cache_shape[1:]) for each in configs]
        dtypes = [each.cache_dtype.value for each in configs]
        sizes = [
            each.cache_shape[0] * torch.Size(shape).numel() * dtype.itemsize
            for each, shape, dtype in zip(configs, shapes, dtypes, strict=True)
        ]
        blocks = memory_config.size
        if memory_config.mode is AllocationMode.RESERVE:
            blocks = (get_accelerator().available_memory() - memory_config.size) // sum(sizes)
        if mp_group is not None:
            least = torch.tensor([blocks], dtype=torch.int64, device=device)
            torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=mp_group)
            blocks = int(least)
        if blocks < 1:
            raise UsageError(f"there is no room for a block of {sum(sizes)} bytes beside {memory_config.size} bytes")
        self._offloads = offload
        self._allocators = [BlockedAllocator(blocks) for _ in configs]
        self._caches = [
            [torch.zeros((blocks, *shape), dtype=dtype, device=device) for _ in range(each.cache_shape[0])]
            for each, shape, dtype in zip(configs, shapes, dtypes, strict=True)
        ]
        self._host: list[dict[int, list[Tensor]]] = [{} for _ in configs]

    def reserve(self, num_blocks: int, cache_group: int = 0) -> Tensor:
        """Numbers of free blocks."""
        return self._allocators[cache_group].allocate(num_blocks)

    def free(self, blocks: Blocks, cache_group: int = 0) -> None:
        """Give blocks back."""
        self._allocators[cache_group].free(blocks)

    def offload(self, blocks: Blocks, cache_group: int = 0) -> Tensor:
        """Move the content of blocks to host memory, and free them; returns numbers for `restore`."""
        if not self._offloads:
            raise UsageError("BlockedKVCache.offload: the cache was made with offload=False")
        given, held = _numbers(blocks), self._host[cache_group]
        first = max(held, default=-1) + 1
        for number, block in enumerate(given, first):
            held[number] = [cache[block].to("cpu", copy=True) for cache in self._caches[cache_group]]
        self.free(given, cache_group)
        return torch.arange(first, first + len(given), dtype=torch.int32)

    def restore(self, blocks: Blocks, cache_group: int = 0) -> Tensor:
        """Bring back what `offload` moved; returns the blocks where it lies now."""
        given = _numbers(blocks)
        found = self.reserve(len(given), cache_group)
        for number, block in zip(given, found.tolist(), strict=True):
            for cache, saved in zip(self._caches[cache_group], self._host[cache_group].pop(number), strict=True):
                cache[block].copy_(saved)
        return found

    def get_cache(self, cache_id: int, cache_group: int = 0) -> Tensor:
        """[blocks, block_size, 2, heads, width] of one cache."""
        return self._caches[cache_group][cache_id]

    @property
    def free_blocks(self) -> Tensor:
        """Of each group."""
        return torch.tensor([each.free_blocks for each in self._allocators], dtype=torch.int32)

    @property
    def num_caches(self) -> int:
        """Groups of caches."""
        return len(self._caches)


def split_kv(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a cache, as views."""
    if kv_cache.dim() != 5 or kv_cache.shape[2] != 2:
        raise UsageError(f"a cache has the shape [blocks, block_size, 2, heads, width], found {tuple(kv_cache.shape)}")
    return kv_cache[:, :, 0], kv_cache[:, :, 1]


@dataclass
class BaseSequenceDescriptor:
    """What a batch must know of a sequence."""

    seen_tokens: int = 0
    cur_allocated_blocks: int = 0
    kv_blocks_ptr: int = 0


class PlaceholderSequenceDescriptor(BaseSequenceDescriptor):
    """A sequence that is not there yet."""


class DSSequenceDescriptor(BaseSequenceDescriptor):
    """A sequence: tokens that are computed or in flight, and its blocks, in tables on the host and on the device."""

    def __init__(
        self,
        tracking_id: int,
        kv_cache_ids: Sequence[Tensor],
        kv_cache_ids_shadow: Sequence[Tensor],
        max_context: int = -1,
    ) -> None:
        super().__init__(kv_blocks_ptr=kv_cache_ids[0].data_ptr())
        self.tracking_id, self.max_context, self.in_flight_tokens = tracking_id, max_context, 0
        self._tables = tuple(kv_cache_ids_shadow), tuple(kv_cache_ids)
        self._counts = [0] * len(self._tables[0])

    def kv_cache_ids(self, cache_group: int = 0, on_device: bool = False) -> Tensor:
        """The table of a group."""
        return self._tables[on_device][cache_group]

    def all_block_ids(self, cache_group: int = 0) -> Tensor:
        """The blocks of a group."""
        return self._tables[0][cache_group].flatten()[: self._counts[cache_group]]

    def pre_forward(self, num_tokens: int) -> None:
        """So many tokens are in flight."""
        self.in_flight_tokens = num_tokens

    def post_forward(self) -> None:
        """What was in flight is computed."""
        self.seen_tokens += self.in_flight_tokens
        self.in_flight_tokens = 0

    def extend_kv_cache(self, new_ids: Sequence[Tensor] | Tensor, cache_group: int = 0) -> None:
        """Add blocks at the end of a table."""
        self._set([*_numbers(self.all_block_ids(cache_group)), *_joined(new_ids)], cache_group)

    def free_kv_cache(self, free_ids: Sequence[Tensor] | Tensor, cache_group: int = 0) -> None:
        """Take blocks out of a table; the others move up."""
        gone = set(_joined(free_ids))
        self._set([block for block in _numbers(self.all_block_ids(cache_group)) if block not in gone], cache_group)

    def _set(self, blocks: list[int], cache_group: int) -> None:
        room = self._tables[0][cache_group].numel()
        if len(blocks) > room:
            raise UsageError(f"sequence {self.tracking_id} has room for {room} blocks, {len(blocks)} are asked for")
        for tables in self._tables:
            tables[cache_group].view(-1)[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        self._counts[cache_group] = len(blocks)
        self.cur_allocated_blocks = sum(self._counts)


def _joined(ids: Sequence[Tensor] | Tensor) -> list[int]:
    return _numbers(torch.cat(list(ids)) if isinstance(ids, (list, tuple)) else torch.as_tensor(ids))


class DSStateManager:
    """Sequences by uid, and the cache that they share."""

    def __init__(
        self, config: DSStateManagerConfig, kv_configs: Sequence[KVCacheConfig], base_mp_group: Any = None
    ) -> None:
        self._config, self._kv_configs = config, tuple(kv_configs)
        self._cache = BlockedKVCache(self._kv_configs, config.memory_config, base_mp_group, config.offload)
        self.get_cache, self.allocate_blocks = self._cache.get_cache, self._cache.reserve
        self.kv_block_size = self._kv_configs[0].block_size
        self.n_kv_cache_groups = self._cache.num_caches
        self.tracked_sequences: dict[int, DSSequenceDescriptor] = {}
        self.get_sequence = self.tracked_sequences.get

    @property
    def n_tracked_sequences(self) -> int:
        """How many sequences there are."""
        return len(self.tracked_sequences)

    @property
    def free_blocks(self) -> Tensor:
        """Of each group."""
        return self._cache.free_blocks

    def get_or_create_sequence(self, uid: int) -> DSSequenceDescriptor:
        """A sequence, which begins now if it is not there."""
        if uid not in self.tracked_sequences:
            if self.n_tracked_sequences >= self._config.max_tracked_sequences:
                raise UsageError(
                    f"{self.n_tracked_sequences} sequences are there, max_tracked_sequences allows no more"
                )
            sizes = [-(-self._config.max_context // each.block_size) for each in self._kv_configs]
            tables = [torch.zeros((1, size), dtype=torch.int32) for size in sizes]
            there = [table.to(self._cache.get_cache(0).device, copy=True) for table in tables]
            self.tracked_sequences[uid] = DSSequenceDescriptor(uid, there, tables, self._config.max_context)
        return self.tracked_sequences[uid]

    def flush_sequence(self, uid: int) -> None:
        """Forget a sequence, and free its blocks."""
        sequence = self.tracked_sequences.pop(uid, None)
        for group in range(self.n_kv_cache_groups if sequence is not None else 0):
            self._cache.free(sequence.all_block_ids(group), group)  # type: ignore[union-attr]


class RaggedBatchWrapper:
    """Tokens of several sequences in one row, and where each of them begins."""

    def __init__(self, config: DSStateManagerConfig) -> None:
        self._config = config
        self.clear()

    def clear(self) -> None:
        """Begin a new batch."""
        self._tokens: list[Tensor] = []

    def insert_sequence(self, seq_descriptor: BaseSequenceDescriptor, tokens: Tensor, do_checks: bool = True) -> None:
        """Add tokens of a sequence."""
        counts = {
            "max_ragged_sequence_count": self.current_sequences + 1,
            "max_ragged_batch_size": self.current_tokens + tokens.numel(),
        }
        for name, count in counts.items() if do_checks else ():
            if count > (most := getattr(self._config, name)):
                raise UsageError(f"the batch would have {count} sequences or tokens, above {name} ({most})")
        self._tokens.append(tokens.flatten())

    @property
    def current_tokens(self) -> int:
        """Tokens of the batch."""
        return sum(each.numel() for each in self._tokens)

    @property
    def current_sequences(self) -> int:
        """Sequences of the batch."""
        return len(self._tokens)

    def input_ids(self) -> Tensor:
        """All tokens, one sequence after the other."""
        return torch.cat(self._tokens) if self._tokens else torch.zeros(0, dtype=torch.int64)

    def tokens_to_seq(self) -> Tensor:
        """The sequence of each token."""
        counts = torch.tensor([len(each) for each in self._tokens], dtype=torch.int64)
        return torch.arange(len(counts)).repeat_interleave(counts)
