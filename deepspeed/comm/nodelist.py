"""Slurm's compact host lists: `node[01-03,7],gpu5` → node01, node02, node03, node7, gpu5."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from deepspeed.errors import RendezvousError

__all__ = ["expand", "first_host"]

_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")  # a name with whole bracket groups; commas split only outside them
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand(nodelist: str) -> Iterator[str]:
    """The hosts of a Slurm node list, in its order."""
    text = nodelist.strip()
    items = _ITEM.findall(text)
    if not items or ",".join(items) != text:
        raise _malformed(nodelist)
    for item in items:
        parts = [(match[1], match[2]) for match in _PART.finditer(item)]  # (numbers, None) or (None, text)
        choices = [[text] if numbers is None else _numbers(nodelist, numbers) for numbers, text in parts]
        for chosen in itertools.product(*choices):
            yield "".join(chosen)


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: where rank 0 runs."""
    return next(expand(nodelist))


def _numbers(nodelist: str, group: str) -> list[str]:
    """`01-03,7` → 01, 02, 03, 7; the width of a range's first number is kept."""
    numbers: list[str] = []
    for text in group.split(","):
        match = _RANGE.fullmatch(text.strip())
        if match is None:
            raise _malformed(nodelist)
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low):
            raise _malformed(nodelist)
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return numbers


def _malformed(nodelist: str) -> RendezvousError:
    return RendezvousError(
        f"{nodelist!r} is not a Slurm node list such as 'node[01-03,7],gpu5'. "
        "Set MASTER_ADDR to the host of rank 0 on every rank."
    )
