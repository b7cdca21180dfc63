"""Errors of operations between ranks, with the stages of the ranks that they name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed.errors import CommError
from deepspeed.parallel.topology import ProcessTopology

__all__ = ["naming_stages"]

_RANKS = re.compile(r"\branks? (\d+(?:, \d+)*)")


@contextmanager
def naming_stages(topology: ProcessTopology) -> Iterator[None]:
    """A rank that was lost is told by its stage, too."""
    try:
        yield
    except CommError as error:
        raise CommError(_with_stages(str(error), topology)) from error


def _with_stages(message: str, topology: ProcessTopology) -> str:
    """The first line says who is at fault; behind it stands which stages these ranks have."""
    first, *rest = message.split("\n", 1)
    named = {int(rank) for found in _RANKS.findall(first) for rank in found.split(", ")}
    known = sorted(rank for rank in named if rank < topology.world_size())
    stages = ", ".join(f"stage {getattr(topology.get_coord(rank), 'pipe', 0)} on rank {rank}" for rank in known)
    return "\n".join([f"{first}; the pipeline has {stages}" if stages else first, *rest])
