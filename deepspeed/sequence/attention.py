"""Attention over a sequence of which every rank has a part: heads exchanged, keys passed around a ring, or both."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed.errors import UsageError
from deepspeed.parallel import AxisGroup
from deepspeed.sequence.exchange import gather_heads, head_plan, scatter_queries_keys_values
from deepspeed.sequence.inputs import TokenOrder
from deepspeed.sequence.ring import Ring, ring_attention
from deepspeed.transformers.attention import (
    CoreAttention,
    Masks,
    SequenceInfo,
    configs_in,
    core_attention,
    free_name,
    is_causal,
    models_in,
    register_attention,
    require_attention,
)

# What has a value per head or per pair of tokens, and would have to be cut, too.
_UNCUT = ("position_bias", "s_aux", "head_mask", "alibi", "cu_seq_lens_q", "cu_seq_lens_k")


@dataclass(frozen=True, eq=False)
class SequenceGroups:
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
    core: CoreAttention,
    ways: SequenceGroups,
    whole: SequenceInfo,
    **options: Any,
) -> tuple[Tensor, Any]:
    """([batch, part, heads, width], weights or None) of query, key and value, each [batch, heads, part, width]."""
    query, key, value = tensors
    options = core_options(options)
    if options.get("sliding_window") is not None and not is_causal(module, options):
        raise UsageError(
            f"attention with a window of {options['sliding_window']} in both directions cannot be shared out over "
            "sequence-parallel ranks. Train this model without sequence_parallel_size."
        )
    if query.shape[2] != key.shape[2]:
        raise UsageError(
            f"attention of {query.shape[2]} queries to {key.shape[2]} keys was asked for: a cache of keys cannot be "
            "used while a sequence is shared out over ranks. Pass use_cache=False, or generate with the bare module."
        )
    plan = None if ways.ulysses is None else head_plan(query.shape[1], key.shape[1], ways.ulysses.size())
    if plan is not None and ways.ulysses is not None:
        parts = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        exchanged = scatter_queries_keys_values(parts, plan, ways.ulysses)
        query, key, value = (tensor.transpose(1, 2) for tensor in exchanged)
    weights = None
    if ways.ring is not None:
        ring = _ring(module, query, ways, whole, options)
        out = ring_attention(query, key, value, ring).transpose(1, 2)
    else:
        out, weights = core(module, query, key, value, whole, **options)
    if plan is not None and ways.ulysses is not None:
        out = gather_heads(out, plan.queries, ways.ulysses)
    return out, weights


def _ring(
    module: nn.Module, query: Tensor, ways: SequenceGroups, whole: SequenceInfo, options: Mapping[str, Any]
) -> Ring:
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


class SequenceAttention:
    """Attention over the whole sequence while a forward of the engine runs, else over what it gets."""

    def __init__(self, core: CoreAttention, ways: SequenceGroups) -> None:
        self._core, self._ways, self._masks = core, ways, Masks()
        self.inner = core.function
        self.current: SequenceInfo | None = None
        """The sequences of the forward that runs."""
        self.used = False
        """Attention was computed over ranks since this was set to false."""

    def mask(self, *args: Any, **kwargs: Any) -> Tensor:
        """What Transformers calls to make a mask."""
        mask = self._masks(*args, **kwargs)
        self._masks.stands_for(mask, self.current if self.current is not None else SequenceInfo(0))
        return mask

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """What Transformers calls to compute attention."""
        # A graph has no table of masks; it runs again as it is, and not by attention functions that look for theirs.
        captured = torch.compiler.is_compiling() and self.current is not None
        whole = self.current if captured else self._masks.whole(attention_mask)
        if whole is None and attention_mask is not None:
            raise UsageError(
                "attention got a mask that the model did not make in this forward: one of four dims, or a copy. Pass "
                "padding masks of two dims, and use checkpoints without reentrance (use_reentrant=False)."
            )
        if whole is None or whole.length == 0:  # the bare module is called, or a part of it that has no mask
            return self._alone(module, (query, key, value), attention_mask, kwargs)
        self.used = True
        return attend(module, (query, key, value), self._core, self._ways, whole, **kwargs)

    def _alone(
        self, module: nn.Module, tensors: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor, Any]:
        rows, length = tensors[1].shape[0], tensors[1].shape[2]
        positions = options.get("position_ids")
        if positions is not None and (positions.dim() != 2 or positions.shape[1] != length):
            positions = None
        whole = SequenceInfo.of(length, None if positions is None else positions.expand(rows, length), mask)
        return self._core(module, *tensors, whole, **core_options(options))

    @classmethod
    def install(cls, module: nn.Module, ways: SequenceGroups, stack: ExitStack) -> SequenceAttention:
        """Let every model of Transformers in a module use it, until the stack is closed."""
        model = models_in(module)[0]
        require_attention(type(model).__name__, model.config)
        attention = cls(core_attention(model.config._attn_implementation, type(model)), ways)
        name = free_name("deepspeed_sequence")
        stack.callback(register_attention(name, attention, attention.mask))
        for config in configs_in(module):
            stack.callback(setattr, config, "_attn_implementation", config._attn_implementation)
            config._attn_implementation = name
        return attention
