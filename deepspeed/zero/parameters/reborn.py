"""Parameters that were constructed in shards, and are cut in another way before an engine uses them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from deepspeed.parallel import AxisGroup
from deepspeed.zero.parameters import gather as fetch
from deepspeed.zero.parameters.parameter import ordinary_class, shard_parameter
from deepspeed.zero.parameters.shard import Shard, shards_of

__all__ = ["Reborn"]


class Reborn:
    """Opens parameters that `zero.Init` sharded; what they have become is sharded over the ranks of an engine."""

    def __init__(self, axis: AxisGroup) -> None:
        self._axis = axis
        self._done: set[int] = set()

    @contextmanager
    def __call__(self, params: Iterable[nn.Parameter], axis: AxisGroup | None = None) -> Iterator[None]:
        """Inside, these parameters are whole and ordinary; all ranks come here together. Once for each of them.

        They are sharded over `axis` afterwards, if it is given: experts lie on other ranks than the rest.
        """
        shards = [shard for shard in shards_of(params) if id(shard.param) not in self._done]
        self._done.update(id(shard.param) for shard in shards)
        fetch.gather([shard for shard in shards if not shard.whole])
        for shard in shards:
            _open(shard)
        yield
        for shard in shards:
            mine = shard_parameter(shard.param, axis or self._axis, shard.name, shard.remote)
            mine.strict, mine.gather = shard.strict, shard.gather
            if mine.numel and not mine.alone:
                mine.release()


def _open(shard: Shard) -> None:
    """Make an ordinary parameter of a whole one that knows its shard."""
    param = shard.param
    param.__class__ = ordinary_class(type(param))
    del param._zero  # type: ignore[attr-defined]
