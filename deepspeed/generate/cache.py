"""Pages of keys and values: on the device by groups of layers, and in host memory for blocks that had to leave."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.discover import local_ranks
from deepspeed.config.inference import AllocationMode, DSStateManagerConfig
from deepspeed.config.memory import size_text
from deepspeed.errors import UsageError
from deepspeed.generate.blocks import CacheGroup

_USUAL = 0.25
"""Length of a usual sequence, as a part of the longest."""
_FEWEST = 2
"""Blocks of a cache that can do anything."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What a layer keeps of a token, on this rank."""

    layer: int
    heads: int
    """Of keys and values."""
    key_width: int
    value_width: int
    window: int | None = None

    @property
    def numel(self) -> int:
        """Numbers of one token."""
        return self.heads * (self.key_width + self.value_width)


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """The pages of one layer, [blocks, block size, heads, width]."""

    group: int
    window: int | None
    keys: Tensor
    values: Tensor
    key_scale: Tensor | None = None
    """What 8-bit numbers are multiplied by, for each head; None where pages are not 8-bit."""
    value_scale: Tensor | None = None


Scales = Mapping[int, tuple[Tensor, Tensor]]
"""Scales of keys and values by layer."""


@dataclass(frozen=True, slots=True)
class CachePlan:
    """How many blocks each group has, on the device and in host memory."""

    groups: tuple[CacheGroup, ...]
    block_bytes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def device_bytes(self) -> int:
        """Of all pages."""
        return sum(group.blocks * size for group, size in zip(self.groups, self.block_bytes, strict=True))


def plan_cache(
    layers: Sequence[LayerShape], config: DSStateManagerConfig, dtype: torch.dtype, device: torch.device
) -> CachePlan:
    """Sizes from the config and what the device has free; an error with the sizes where there is no room."""
    pages = torch.float8_e4m3fn if config.kv_dtype == "fp8" else dtype
    windows = sorted({layer.window for layer in layers}, key=lambda window: (window is not None, window or 0))
    members = [tuple(layer for layer in layers if layer.window == window) for window in windows]
    sizes = [sum(layer.numel for layer in held) * config.block_size * pages.itemsize for held in members]
    shares = [_share(window, config) for window in windows]
    wanted = _blocks(config, sizes, shares, device)
    blocks = [max(_FEWEST, -(-int(wanted * share * 1024) // 1024)) for share in shares]
    budget = config.host_bytes(sum(map(int.__mul__, blocks, sizes)))
    host = int(budget // max(1, sum(size * share for size, share in zip(sizes, shares, strict=True))))
    return CachePlan(
        tuple(
            CacheGroup(tuple(layer.layer for layer in held), count, window, int(host * share))
            for held, count, window, share in zip(members, blocks, windows, shares, strict=True)
        ),
        tuple(sizes),
        pages,
    )


def _share(window: int | None, config: DSStateManagerConfig) -> float:
    """Blocks of layers with a window, as a part of those that see everything: most sequences are not the longest."""
    if window is None:
        return 1.0
    return min(1.0, (window + config.block_size) / (config.max_context * _USUAL))


def _blocks(config: DSStateManagerConfig, sizes: Sequence[int], shares: Sequence[float], device: torch.device) -> int:
    """Blocks of a group without a window."""
    per_block = sum(size * share for size, share in zip(sizes, shares, strict=True))
    longest = -(-config.max_context // config.block_size)
    useful = longest * config.max_tracked_sequences
    memory = config.memory_config
    free = _free_bytes(device)
    if memory.mode is AllocationMode.ALLOCATE:
        needed = int(memory.size * per_block)
        if needed > free:
            raise UsageError(
                f"memory_config asks for {memory.size} blocks, {size_text(needed)} of keys and values, but "
                f"{device} has {size_text(free)} free. Set memory_config.size to at most {int(free // per_block)}."
            )
        return memory.size
    found = min(useful, int((free - memory.size) // per_block))
    if found < _FEWEST:
        raise UsageError(
            f"there is no room for a cache: {device} has {size_text(free)} free, of which {size_text(memory.size)} "
            f"stay free (memory_config.size), and one block of {config.block_size} tokens takes "
            f"{size_text(int(per_block))}. Reserve less, use quantised weights or more ranks."
        )
    return found


def _free_bytes(device: torch.device) -> int:
    accelerator = get_accelerator()
    if device.type == "cpu":
        # pages of host memory are touched only when they are used; half of it is what others leave
        return accelerator.available_memory() // (2 * local_ranks())
    accelerator.empty_cache()
    return int(accelerator.available_memory(device.index))


class PagedCache:
    """Memory of all groups: a block number means the same tokens in every layer of its group."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        plan: CachePlan,
        block_size: int,
        device: torch.device,
        scales: Scales | None = None,
    ) -> None:
        self.plan, self.block_size, self.device = plan, block_size, device
        self._layers: dict[int, CachedLayer] = {}
        self._shapes = {layer.layer: layer for layer in layers}
        self._scales = scales or {}
        self._pages: list[list[Tensor]] = []
        self._host: list[Tensor] = []
        self.allocate()

    def allocate(self) -> None:
        """Take the memory; pages hold zeros."""
        for index, group in enumerate(self.plan.groups):
            held: list[Tensor] = []
            for number in group.layers:
                shape = self._shapes[number]
                keys = self._empty(group.blocks, shape.heads, shape.key_width)
                values = self._empty(group.blocks, shape.heads, shape.value_width)
                held += [keys, values]
                scales = self._scales.get(number, (None, None))
                self._layers[number] = CachedLayer(index, shape.window, keys, values, *scales)
            self._pages.append(held)
            count, numel = group.host_blocks, sum(each[0].numel() for each in held)
            pinned = self.device.type != "cpu" and count > 0
            self._host.append(torch.zeros(count, numel, dtype=self.plan.dtype, pin_memory=pinned))

    def _empty(self, blocks: int, heads: int, width: int) -> Tensor:
        shape, dtype = (blocks, self.block_size, heads, width), self.plan.dtype
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=self.device)
        # torch.zeros would write all of it; the system gives these pages when they are used, and they are zeros
        memory = numpy.zeros(math.prod(shape) * dtype.itemsize, numpy.uint8)
        return torch.from_numpy(memory).view(dtype).view(shape)

    def release(self) -> None:
        """Give all memory back; `allocate` takes it again."""
        self._layers.clear()
        self._pages.clear()
        self._host.clear()

    def layer(self, number: int) -> CachedLayer:
        """The pages of a layer."""
        return self._layers[number]

    def to_host(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy (group, device block, host block): all layers of a block are one piece on their way."""
        for group, chosen in _by_group(moves):
            index = torch.tensor([source for source, _ in chosen], device=self.device)
            parts = [_bits(page).index_select(0, index).flatten(1) for page in self._pages[group]]
            packed, host = torch.cat(parts, 1), _bits(self._host[group])
            for first, target, count in _runs([target for _, target in chosen]):
                host[target : target + count].copy_(packed[first : first + count], non_blocking=True)

    def from_host(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy (group, host block, device block)."""
        for group, chosen in _by_group(moves):
            host = _bits(self._host[group])
            packed = torch.empty(len(chosen), host.shape[1], dtype=host.dtype, device=self.device)
            for first, source, count in _runs([source for source, _ in chosen]):
                packed[first : first + count].copy_(host[source : source + count], non_blocking=True)
            index = torch.tensor([target for _, target in chosen], device=self.device)
            pages = [_bits(page) for page in self._pages[group]]
            for page, part in zip(pages, packed.split([page[0].numel() for page in pages], 1), strict=True):
                page.index_copy_(0, index, part.view(-1, *page.shape[1:]))


def _bits(tensor: Tensor) -> Tensor:
    """8-bit numbers as bytes, which every copy knows."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _by_group(moves: Sequence[tuple[int, int, int]]) -> list[tuple[int, list[tuple[int, int]]]]:
    groups: dict[int, list[tuple[int, int]]] = {}
    for group, source, target in moves:
        groups.setdefault(group, []).append((source, target))
    return sorted(groups.items())


def _runs(blocks: Sequence[int]) -> list[tuple[int, int, int]]:
    """(place, block, count): blocks that lie one after the other move in one copy."""
    runs: list[tuple[int, int, int]] = []
    for place, block in enumerate(blocks):
        if runs and block == runs[-1][1] + runs[-1][2]:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((place, block, 1))
    return runs
