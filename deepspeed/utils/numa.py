"""Lists of processor cores as the command line spells them: "0,2-4,6"."""

from __future__ import annotations

import re

__all__ = ["parse_range_list"]

_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def parse_range_list(rng_str: str) -> list[int]:
    """ "0,2-4,6" → [0, 2, 3, 4, 6]; the ranges ascend, do not overlap, and there are no spaces."""
    cores: list[int] = []
    for part in rng_str.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(
                f"core list {rng_str!r}: {part!r} is neither a number nor a range; expected a list such as 0,2-4,6"
            )
        first = int(match[1])
        last = int(match[2] or match[1])
        if last < first:
            raise ValueError(f"core list {rng_str!r}: the range {part!r} descends; write {last}-{first}")
        if cores and first <= cores[-1]:
            raise ValueError(
                f"core list {rng_str!r}: {part!r} begins at {first}, but {cores[-1]} is already listed; "
                "the ranges must ascend and not overlap"
            )
        cores.extend(range(first, last + 1))
    return cores
