"""`deepspeed.module_inject.tp_shard`: how the elements of a dim are shared out among tensor-parallel ranks.

Projects that cut their own layers set the facts of their model first; they count for calls without `meta`.
"""

from __future__ import annotations

from typing import Any

from deepspeed import comm
from deepspeed.tensor_parallel.linear_modules import AutoTPMeta
from deepspeed.tensor_parallel.linear_modules import get_shard_size_list as shard_sizes

_MODEL = AutoTPMeta()


def set_num_kv_heads(num: int | None) -> None:
    """Key-value heads of the model."""
    _MODEL.num_kv_heads = num


def get_num_kv_heads() -> int | None:
    """What `set_num_kv_heads` set."""
    return _MODEL.num_kv_heads


def set_num_attention_heads(num: int | None) -> None:
    """Query heads of the model."""
    _MODEL.num_attention_heads = num


def get_num_attention_heads() -> int | None:
    """What `set_num_attention_heads` set."""
    return _MODEL.num_attention_heads


def set_n_embd(num: int | None) -> None:
    """The width of the model."""
    _MODEL.n_embd = num


def get_n_embd() -> int | None:
    """What `set_n_embd` set."""
    return _MODEL.n_embd


def set_tp_grain_size(num: int) -> None:
    """Dims without heads are cut at multiples of this."""
    _MODEL.tp_grain_size = num


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
