"""`deepspeed.module_inject.tp_shard`: how the elements of a dim are shared out among tensor-parallel ranks.

Projects that cut their own layers set the facts of their model first; they count for calls without `meta`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from deepspeed import comm
from deepspeed.tensor_parallel.linear_modules import AutoTPMeta
from deepspeed.tensor_parallel.linear_modules import get_shard_size_list as shard_sizes

_MODEL = AutoTPMeta()


def _fact(name: str) -> tuple[Callable[[int | None], None], Callable[[], int | None]]:
    """What sets a fact of the model, and what tells it."""
    return partial(setattr, _MODEL, name), partial(getattr, _MODEL, name)


set_num_kv_heads, get_num_kv_heads = _fact("num_kv_heads")
set_num_attention_heads, get_num_attention_heads = _fact("num_attention_heads")
set_n_embd, get_n_embd = _fact("n_embd")
set_tp_grain_size, get_tp_grain_size = _fact("tp_grain_size")  # dims without heads are cut at multiples of this


def get_shard_size_list(
    total_size: int, mp_size: int, meta: AutoTPMeta | str | None = None, name: str | None = None
) -> list[int]:
    """The elements of each of `mp_size` ranks; older callers give the name of the layer in place of `meta`."""
    if isinstance(meta, str):
        meta, name = None, meta
    return shard_sizes(total_size, mp_size, meta or _MODEL, name)


def get_shard_size(
    total_size: int,
    mp_size: int,
    meta: AutoTPMeta | str | None = None,
    name: str | None = None,
    rank: int | None = None,
    mp_group: Any = None,
) -> int:
    """The elements of one rank; of this one if `rank` is None."""
    place = rank if rank is not None else comm.get_rank(mp_group) % mp_size
    return get_shard_size_list(total_size, mp_size, meta, name)[place]
