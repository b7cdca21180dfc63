"""Finds the attention projections of a model and how many heads each is made of, for per-head Muon."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["tag_attention_heads"]

_QUERY = frozenset({"q_proj", "query", "query_proj", "wq", "to_q", "q_b_proj", "kv_b_proj"})
_KEY_VALUE = frozenset({"k_proj", "v_proj", "key", "value", "key_proj", "value_proj", "wk", "wv", "to_k", "to_v"})
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")


def tag_attention_heads(model: nn.Module) -> dict[str, int]:
    """Set `muon_num_heads` on the weight of every query, key and value projection; name → heads of those tagged.

    The numbers come from `model.config` (or its `text_config`), as transformers models have it. A projection whose
    rows do not split into that many heads stays untagged.
    """
    heads = _configured(model, _HEADS)
    key_value_heads = _configured(model, _KEY_VALUE_HEADS) or heads
    tagged: dict[str, int] = {}
    for name, param in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        kind = owner.rpartition(".")[2]
        count = heads if kind in _QUERY else key_value_heads if kind in _KEY_VALUE else None
        shape = tuple(getattr(param, "ds_shape", param.shape))
        if leaf != "weight" or count is None or len(shape) != 2 or shape[0] % count:
            continue
        setattr(param, "muon_num_heads", count)  # noqa: B010  a Parameter has no such attribute of its own
        tagged[name] = count
    return tagged


def _configured(model: nn.Module, names: tuple[str, ...]) -> int | None:
    config: Any = getattr(model, "config", None)
    for source in (getattr(config, "text_config", None), config):
        for name in names:
            value = source.get(name) if isinstance(source, dict) else getattr(source, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None
