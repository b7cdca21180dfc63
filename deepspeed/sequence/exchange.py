"""Heads for parts of the sequence and back: one all-to-all for any number of tensors, with its backward.

Inside, tensors are [batch, sequence, heads, width]. A rank begins with its part of the sequence and all heads, and
has all of the sequence and its heads afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library
from torch.distributed import ProcessGroup

from deepspeed import comm
from deepspeed.errors import LayoutError
from deepspeed.parallel.regions import named_group


@dataclass(frozen=True)
class HeadPlan:
    """For every rank, the query heads it computes and the key/value heads it needs for them."""

    queries: tuple[int, ...]
    """Query heads of each rank, which lie side by side."""
    keys: tuple[tuple[int, ...], ...]
    """Key/value heads of each rank; one that several query heads need may be there more than once."""

    @property
    def size(self) -> int:
        """Ranks."""
        return len(self.queries)

    @property
    def key_counts(self) -> tuple[int, ...]:
        """Key/value heads that each rank gets."""
        return tuple(map(len, self.keys))

    @property
    def sent_keys(self) -> tuple[int, ...]:
        """All key/value heads in the order in which they are sent."""
        return tuple(head for heads in self.keys for head in heads)

    @property
    def repeats(self) -> bool:
        """True if a key/value head goes to more than one place."""
        sent = self.sent_keys
        return sent != tuple(range(len(sent)))

    def group(self, rank: int) -> int:
        """How many neighbouring query heads share a key/value head on this rank."""
        return self.queries[rank] // len(self.keys[rank])


def head_plan(queries: int, keys: int, size: int) -> HeadPlan:
    """Share heads out over `size` ranks as evenly as they go; key/value heads stay together with their queries.

    Where there are fewer key/value heads than ranks, each goes to every rank that has one of its query heads.
    """
    return (_share_heads if torch.compiler.is_compiling() else _known_plan)(queries, keys, size)


def _share_heads(queries: int, keys: int, size: int) -> HeadPlan:
    if queries % keys:
        raise LayoutError(
            f"{queries} query heads cannot share {keys} key/value heads evenly. Use a multiple of {keys} query heads."
        )
    if queries < size:
        raise LayoutError(
            f"{queries} attention heads cannot be shared out over {size} sequence-parallel ranks: some would have "
            f"none. Use at most {queries} ranks, or ring attention (sequence_parallel.attention ring or auto)."
        )
    group = queries // keys
    if keys >= size:
        counts = shares(keys, size)
        borders = list(accumulate(counts, initial=0))
        owned = tuple(tuple(range(begin, end)) for begin, end in pairwise(borders))
        return HeadPlan(tuple(count * group for count in counts), owned)
    counts = shares(queries, size)
    borders = list(accumulate(counts, initial=0))
    return HeadPlan(counts, tuple(_needed(a, b, group) for a, b in pairwise(borders)))


_known_plan = cache(_share_heads)  # torch.compile traces into no cache


def shares(total: int, size: int) -> tuple[int, ...]:
    """`total` things over `size` ranks, the first ranks one more where they do not go evenly."""
    least, more = divmod(total, size)
    return tuple(least + (rank < more) for rank in range(size))


def _needed(begin: int, end: int, group: int) -> tuple[int, ...]:
    """Key/value heads for the query heads [begin, end), each for as many neighbours as all others."""
    whole = begin % group == 0 and end % group == 0
    if whole or begin // group == (end - 1) // group:
        return tuple(range(begin // group, (end - 1) // group + 1))
    return tuple(head // group for head in range(begin, end))


Counts = tuple[int, ...]


def scatter_queries_keys_values(
    tensors: tuple[Tensor, Tensor, Tensor], plan: HeadPlan, group: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's heads over the whole sequence, by one all-to-all."""
    query, key, value = tensors
    if plan.repeats:
        order = torch.tensor(plan.sent_keys, device=key.device)
        key, value = key.index_select(2, order), value.index_select(2, order)
    counts = (plan.queries, plan.key_counts, plan.key_counts)
    if not query.dtype == key.dtype == value.dtype:  # one buffer has one dtype
        pairs = zip((query, key, value), counts, strict=True)
        return tuple(scatter_heads(tensor, heads, group) for tensor, heads in pairs)  # type: ignore[return-value]
    return _Exchange.apply(group, counts, True, query, key, value)  # type: ignore[no-any-return, no-untyped-call]


def scatter_heads(tensor: Tensor, heads: Counts, group: ProcessGroup) -> Tensor:
    """[batch, part, all heads, width] → [batch, whole, this rank's heads, width]."""
    return _Exchange.apply(group, (heads,), True, tensor)[0]  # type: ignore[no-any-return, no-untyped-call]


def gather_heads(tensor: Tensor, heads: Counts, group: ProcessGroup) -> Tensor:
    """[batch, whole, this rank's heads, width] → [batch, part, all heads, width]."""
    return _Exchange.apply(group, (heads,), False, tensor)[0]  # type: ignore[no-any-return, no-untyped-call]


def of_all_ranks(part: Tensor, lengths: Sequence[int], group: ProcessGroup) -> Tensor:
    """Parts of all ranks, of these lengths, side by side in dim 1; gradients are summed over ranks."""
    copies = padded(part, max(lengths)).transpose(0, 1).repeat(1, group.size(), 1)[None]
    return unpadded(scatter_heads(copies, (part.shape[0],) * group.size(), group)[0].transpose(0, 1), lengths)


def lengths_of_ranks(parts: Sequence[Tensor], group: ProcessGroup) -> list[list[int]]:
    """For each of some tensors, how long the parts of all ranks are in dim 1; the host waits for it."""
    mine = torch.tensor([part.shape[1] for part in parts], device=parts[0].device)
    found = mine.new_empty(group.size() * len(parts))
    comm.all_gather_into_tensor(found, mine, group=group)
    return found.view(group.size(), -1).t().tolist()


def padded(part: Tensor, length: int) -> Tensor:
    """[rows, part, …] with zeros behind, up to a length: an exchange needs equal parts."""
    missing = length - part.shape[1]
    return F.pad(part, (*(0, 0) * (part.dim() - 2), 0, missing)) if missing else part


def unpadded(parts: Tensor, lengths: Sequence[int]) -> Tensor:
    """Padded parts that lie side by side in dim 1, without their padding."""
    if min(lengths) == max(lengths):
        return parts
    pieces = parts.chunk(len(lengths), 1)
    return torch.cat([piece[:, :length] for piece, length in zip(pieces, lengths, strict=True)], 1)


def padded_parts(whole: Tensor, lengths: Sequence[int]) -> Tensor:
    """The other way: parts of these lengths, each padded to the longest."""
    if min(lengths) == max(lengths):
        return whole
    return torch.cat([padded(part, max(lengths)) for part in whole.split(list(lengths), 1)], 1)


class _Exchange(torch.autograd.Function):
    """The exchange in one direction; its gradient is the exchange in the other."""

    @staticmethod
    def forward(
        ctx: Any, group: ProcessGroup, counts: tuple[Counts, ...], scatters: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.way = group, counts, scatters
        return _exchange(tensors, counts, group, scatters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        group, counts, scatters = ctx.way
        return None, None, None, *_exchange(grads, counts, group, not scatters)


def _exchange(
    tensors: Sequence[Tensor], counts: tuple[Counts, ...], group: ProcessGroup, scatters: bool
) -> tuple[Tensor, ...]:
    """One all-to-all of what each rank gets of every tensor; `counts` are heads per rank of each of them."""
    size, rank = len(counts[0]), group.rank()
    if size == 1:
        return tuple(tensors)
    cuts = [
        tensor.split(heads, 2) if scatters else tensor.chunk(size, 1)
        for tensor, heads in zip(tensors, counts, strict=True)
    ]
    sent = [[cut[peer] for cut in cuts] for peer in range(size)]
    shapes = [
        [_arriving(cut[rank].shape, heads[rank if scatters else peer]) for cut, heads in zip(cuts, counts, strict=True)]
        for peer in range(size)
    ]
    flat = torch.cat([piece.reshape(-1) for pieces in sent for piece in pieces])
    arrived = [sum(map(math.prod, each)) for each in shapes]
    leaving = [sum(p.numel() for p in pieces) for pieces in sent]
    if torch.compiler.is_compiling():
        landed = torch.ops.deepspeed_sequence.exchange(flat, group.group_name, arrived, leaving)
    else:
        landed = _swap(flat, group, arrived, leaving)
    sizes = [[math.prod(shape) for shape in each] for each in shapes]
    blocks = [block.split(each) for block, each in zip(landed.split(arrived), sizes, strict=True)]
    return tuple(
        torch.cat([blocks[peer][at].view(shapes[peer][at]) for peer in range(size)], 1 if scatters else 2)
        for at in range(len(tensors))
    )


def _swap(flat: Tensor, group: ProcessGroup, arriving: Sequence[int], leaving: Sequence[int]) -> Tensor:
    landed = flat.new_empty(sum(arriving))
    comm.all_to_all_single(landed, flat, list(arriving), list(leaving), group=group)
    return landed


# The same as an operation of a graph, which names the ranks by their group.
_LIBRARY = library.Library("deepspeed_sequence", "DEF")
_LIBRARY.define("exchange(Tensor flat, str group, SymInt[] arriving, SymInt[] leaving) -> Tensor")
_LIBRARY.impl(
    "exchange", lambda flat, name, *sizes: _swap(flat, named_group(name), *sizes), "CompositeExplicitAutograd"
)
library.register_fake(
    "deepspeed_sequence::exchange", lambda flat, name, arriving, leaving: flat.new_empty(sum(arriving)), lib=_LIBRARY
)


def _arriving(own: torch.Size, heads: int) -> tuple[int, int, int, int]:
    """The shape of what comes from a peer: as this rank's own part, but for the heads."""
    batch, length, _, width = own
    return batch, length, heads, width
