"""How many elements of a dim each rank gets, by the published functions: whole key-value heads, or whole grains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepspeed.fragments import deal

__all__ = ["AutoTPMeta", "get_shard_size_list"]

_HEADS = ("num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_heads", "n_heads", "n_head")
_QUERIES = ("num_attention_heads", "n_heads", "n_head")
_WIDTHS = ("n_embd", "hidden_size", "d_model")
_WITHOUT_HEADS = ("mlp", "lm_head", "embed_out")
"""Parts of the name of a layer that is not cut by heads."""


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


def get_shard_size_list(
    total_size: int, mp_size: int, meta: AutoTPMeta | None = None, name: str | None = None
) -> list[int]:
    """The elements of each rank; the first ranks get more where they do not go evenly.

    A dim that holds whole heads is cut between key-value heads, unless `name` is that of a layer without heads.
    """
    meta = meta or AutoTPMeta()
    heads = meta.num_kv_heads
    by_heads = (
        heads is not None and total_size % heads == 0 and not any(part in (name or "") for part in _WITHOUT_HEADS)
    )
    unit = total_size // heads if heads is not None and by_heads else meta.tp_grain_size
    if total_size % unit:
        unit = 1
    return [(stop - start) * unit for start, stop in deal(total_size // unit, mp_size)]
