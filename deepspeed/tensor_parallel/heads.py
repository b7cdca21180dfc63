"""`Heads`: which heads of an attention each rank computes. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed.fragments import deal

__all__ = ["Heads"]


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of one attention; `query` is a multiple of `key_value`."""

    query: int
    key_value: int
    dim: int
    """Elements of a head."""

    @property
    def group(self) -> int:
        """Query heads that look at the same keys and values."""
        return self.query // self.key_value

    def shares_keys(self, ranks: int) -> bool:
        """Whether several ranks look at the same keys and values."""
        return self.key_value < ranks

    def queries_of(self, ranks: int) -> list[tuple[int, int]]:
        """The query heads of each rank.

        All of a group go to one rank as long as there are groups enough; else each rank gets heads of one group, so
        that on every rank each of its key-value heads serves equally many of its query heads.
        """
        if not self.shares_keys(ranks):
            return [(start * self.group, stop * self.group) for start, stop in deal(self.key_value, ranks)]
        found = []
        for group, (first, last) in enumerate(deal(ranks, self.key_value)):
            base = group * self.group
            found += [(base + start, base + stop) for start, stop in deal(self.group, last - first)]
        return found

    def keys_of(self, ranks: int) -> list[tuple[int, int]]:
        """The key-value heads of each rank; some appear on several ranks where `shares_keys`."""
        return [(start // self.group, -(-stop // self.group)) for start, stop in self.queries_of(ranks)]

    def fewest(self, ranks: int) -> tuple[int, int]:
        """Query and key-value heads of the rank that has the fewest."""
        pairs = zip(self.queries_of(ranks), self.keys_of(ranks), strict=True)
        return min((queries[1] - queries[0], keys[1] - keys[0]) for queries, keys in pairs)

    def elements(self, heads: tuple[int, int]) -> tuple[int, int]:
        """Where heads lie in a projection."""
        return heads[0] * self.dim, heads[1] * self.dim
