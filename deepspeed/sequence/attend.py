"""Attention over a sequence of which every rank has a part: heads exchanged, keys passed around a ring, or both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed.errors import UsageError
from deepspeed.parallel import AxisGroup
from deepspeed.sequence.core import Core, is_causal
from deepspeed.sequence.distance_bias import DistanceBias
from deepspeed.sequence.exchange import gather_heads, scatter_queries_keys_values
from deepspeed.sequence.heads import head_plan
from deepspeed.sequence.key_bias import KeyBias
from deepspeed.sequence.order import TokenOrder
from deepspeed.sequence.ring import Ring, ring_attention
from deepspeed.sequence.whole import Whole

__all__ = ["Ways", "attend", "core_options"]

# What has a value per head or per pair of tokens, and would have to be cut, too.
_UNCUT = ("position_bias", "s_aux", "head_mask", "alibi", "cu_seq_lens_q", "cu_seq_lens_k")


@dataclass(frozen=True, eq=False)
class Ways:
    """Over whom heads are exchanged and over whom keys travel; None where that has no ranks."""

    order: TokenOrder
    ulysses: ProcessGroup | None = None
    ring: AxisGroup | None = None


def core_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """What an attention function is called with, without what holds for a part of the sequence only."""
    found = [name for name in _UNCUT if options.get(name) is not None]
    if found:
        raise UsageError(
            f"attention was called with {found[0]}, which sequence parallelism cannot share out over its ranks. Train "
            "this model without sequence_parallel_size, or leave that option out."
        )
    return {name: value for name, value in options.items() if name not in ("position_ids", *_UNCUT)}


def attend(
    module: nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    core: Core,
    ways: Ways,
    whole: Whole,
    *,
    bias: KeyBias | DistanceBias | None = None,
    queries: int | None = None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """([batch, part, heads, width], weights or None) of query, key and value, each [batch, heads, part, width].

    With a bias of keys, `scaling` must be told. `whole` are the sequences of keys; where queries belong to others,
    `queries` is the length of these.
    """
    query, key, value = tensors
    options = core_options(options)
    if options.get("sliding_window") is not None and not is_causal(module, options):
        raise UsageError(
            f"attention with a window of {options['sliding_window']} in both directions cannot be shared out over "
            "sequence-parallel ranks. Train this model without sequence_parallel_size."
        )
    if query.shape[2] != key.shape[2] and queries is None:
        raise UsageError(
            f"attention of {query.shape[2]} queries to {key.shape[2]} keys was asked for: a cache of keys cannot be "
            "used while a sequence is shared out over ranks. Pass use_cache=False, or generate with the bare module."
        )
    plan = None if ways.ulysses is None else head_plan(query.shape[1], key.shape[1], ways.ulysses.size())
    if plan is not None and ways.ulysses is not None:
        parts = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        exchanged = scatter_queries_keys_values(parts, plan, ways.ulysses)
        query, key, value = (tensor.transpose(1, 2) for tensor in exchanged)
        bias = None if bias is None else bias.of_heads(plan.queries, ways.ulysses.rank())
    weights, width = None, value.shape[-1]
    if isinstance(bias, KeyBias):
        here = bias if ways.ring is None else bias.on_ring(ways.order, ways.ring.rank)
        query, key, value = here.widen(query, key, value)
    by_distance = bias if isinstance(bias, DistanceBias) else None
    if ways.ring is not None:
        ring = replace(_ring(module, query, ways, whole, options), queries=queries)
        out = ring_attention(query, key, value, ring, by_distance).transpose(1, 2)
    else:
        if by_distance is not None:
            options["position_bias"] = by_distance.whole()
        out, weights = core(module, query, key, value, whole, crossing=queries is not None, **options)
    out = out[..., :width]
    if plan is not None and ways.ulysses is not None:
        out = gather_heads(out, plan.queries, ways.ulysses)
    return out, weights


def _ring(module: nn.Module, query: Tensor, ways: Ways, whole: Whole, options: Mapping[str, Any]) -> Ring:
    assert ways.ring is not None, "asked for where there is a ring"
    for name in ("dropout", "softcap"):
        if options.get(name):
            raise UsageError(
                f"ring attention has no {name}, and the model asks for {options[name]}. Set it to 0 in the model's "
                "config, or choose sequence_parallel.attention ulysses."
            )
    scale = options.get("scaling")
    window = options.get("sliding_window")
    return Ring(
        ways.ring,
        ways.order,
        whole,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        causal=is_causal(module, dict(options)),
        window=None if window is None or window >= whole.length else int(window),
    )
