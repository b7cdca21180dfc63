"""All-gather of host tensors without a second copy: every rank sends its part straight to where it belongs.

gloo's own all-gather makes the whole output once more before it copies that into the one it was given, which doubles
what a gather needs and costs a pass over memory.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as td
from torch import Tensor

from deepspeed.comm.dispatch import DEFAULT
from deepspeed.comm.operations import Operation
from deepspeed.comm.pending import AllOf, CollectiveWork

__all__ = ["gather_parts"]

_TAGS = 1 << 12  # of gathers that may be under way between two ranks
_run = DEFAULT.run
_counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _gather(output: Tensor, part: Tensor, group: Any, async_op: bool) -> AllOf | None:
    size, rank, length = group.size(), group.rank(), part.numel()
    tag = _counts[group] = (_counts.get(group, 0) + 1) % _TAGS
    mine = output.narrow(0, rank * length, length)
    if mine.data_ptr() != part.data_ptr():
        mine.copy_(part)
    works = []
    for step in range(1, size):
        source, target = (rank + step) % size, (rank - step) % size
        works.append(group.recv([output.narrow(0, source * length, length)], source, tag))
        works.append(group.send([mine], target, tag))
    done = AllOf(works, DEFAULT.limit)
    if async_op:
        return done
    done.wait()
    return None


_GATHER = Operation("gather_parts", _gather)


def gather_parts(
    output: Tensor, part: Tensor, group: td.ProcessGroup | None = None, async_op: bool = False
) -> CollectiveWork | None:
    """Fill the flat host tensor `output` with the `part` of every rank, in the order of the ranks; over gloo."""
    real: Any = td.group.WORLD if group is None else group
    return _run(  # type: ignore[no-any-return]
        _GATHER, (output, part, real, async_op), part, group, async_op, (False, "gather_parts", None)
    )
