"""Which heads each rank computes when sequence parts are exchanged for heads: arithmetic without tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

from deepspeed.errors import LayoutError

__all__ = ["HeadPlan", "head_plan", "shares"]


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


@cache
def head_plan(queries: int, keys: int, size: int) -> HeadPlan:
    """Share heads out over `size` ranks as evenly as they go; key/value heads stay together with their queries.

    Where there are fewer key/value heads than ranks, each goes to every rank that has one of its query heads.
    """
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
