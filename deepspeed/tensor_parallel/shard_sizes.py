"""How many elements of a dim each rank gets, by the published functions: whole key-value heads, or whole grains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.fragments import deal

__all__ = ["AutoTPMeta", "get_shard_size", "get_shard_size_list", "set_num_kv_heads", "set_tp_grain_size"]

_HEADS = ("num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_heads", "n_heads", "n_head")
_QUERIES = ("num_attention_heads", "n_heads", "n_head")
_WIDTHS = ("n_embd", "hidden_size", "d_model")
_WITHOUT_HEADS = ("mlp", "lm_head", "embed_out")
"""Parts of the name of a layer that is not cut by heads."""


_told: dict[str, int | None] = {"heads": None, "grain": None}
"""What scripts said once for all calls without a `meta`."""


@dataclass
class AutoTPMeta:
    """What a model tells of its heads."""

    num_kv_heads: int | None = None
    num_attention_heads: int | None = None
    n_embd: int | None = None
    tp_grain_size: int = 1

    @classmethod
    def from_model_config(cls, model_config: Any, tp_grain_size: int = 1) -> AutoTPMeta:
        """Of the config of a model of Transformers; None where it does not tell."""

        def first(names: tuple[str, ...]) -> int | None:
            found = (getattr(model_config, name, None) for name in names)
            return next((value for value in found if isinstance(value, int)), None)

        return cls(first(_HEADS), first(_QUERIES), first(_WIDTHS), tp_grain_size)


def set_num_kv_heads(num: int | None) -> None:
    """Let calls without a `meta` cut between so many key-value heads; None for none."""
    _told["heads"] = num


def set_tp_grain_size(num: int) -> None:
    """Let calls without a `meta` cut what has no heads in multiples of this many elements."""
    if num < 1:
        raise UsageError(f"set_tp_grain_size: {num} elements; expected at least 1")
    _told["grain"] = num


def get_shard_size_list(
    total_size: int, mp_size: int, meta: AutoTPMeta | str | None = None, name: str | None = None
) -> list[int]:
    """The elements of each rank; the first ranks get more where they do not go evenly.

    A dim that holds whole heads is cut between key-value heads, unless `name` is that of a layer without heads. Without
    a `meta` they are those of `set_num_kv_heads`; the name may then come third, as older scripts call it.
    """
    if not isinstance(meta, AutoTPMeta):
        name = name or meta
        meta = AutoTPMeta(num_kv_heads=_told["heads"], tp_grain_size=_told["grain"] or 1)
    heads = meta.num_kv_heads
    by_heads = (
        heads is not None and total_size % heads == 0 and not any(part in (name or "") for part in _WITHOUT_HEADS)
    )
    unit = total_size // heads if heads is not None and by_heads else meta.tp_grain_size
    if total_size % unit:
        unit = 1
    return [(stop - start) * unit for start, stop in deal(total_size // unit, mp_size)]


def get_shard_size(
    total_size: int,
    mp_size: int,
    meta: AutoTPMeta | str | None = None,
    name: str | None = None,
    rank: int | None = None,
    mp_group: Any = None,
) -> int:
    """The elements of one rank: the given one, or this one in its group."""
    place = comm.get_rank(mp_group) if rank is None else rank
    return get_shard_size_list(total_size, mp_size, meta, name)[place]
