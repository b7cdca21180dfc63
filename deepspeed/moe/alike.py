"""Whether ranks that share tokens chose the same experts for them, which nothing else would tell."""

from __future__ import annotations

import zlib
from typing import Any

from torch import Tensor

from deepspeed import comm
from deepspeed.errors import CommError
from deepspeed.parallel import AxisGroup

__all__ = ["require_alike"]


def require_alike(chosen: Tensor, axis: AxisGroup, path: str) -> None:
    """An error on every rank of the axis unless all of them chose alike; hosts wait for each other."""
    plain = chosen.detach().long().cpu().contiguous()
    told: list[Any] = [None] * axis.size
    with comm.labelled("whether routers agree"):
        comm.all_gather_object(told, (tuple(plain.shape), zlib.crc32(plain.numpy().data)), group=axis.group)
    for place, other in enumerate(told):
        if other != told[0]:
            raise CommError(
                f"{path}: rank {axis.ranks[place]} chose experts {other[0]} otherwise than rank {axis.ranks[0]} "
                f"{told[0][0]}, with which it shares layers and tokens (expert_parallel.validate_folding_routing). "
                "Give both the same batches, and let routers draw the same numbers"
            )
