"""Rotary embedding inside attention modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.fusion.again import not_kept
from deepspeed.fusion.functions import copied, exchanged, innermost
from deepspeed.fusion.likeness import alike, overridden
from deepspeed.fusion.swap import TOKENS, Refused, Swap, put_forward
from deepspeed.ops.model.rotary import rotary, rotary_reference
from deepspeed.ops.rehearsal import forth_and_back

__all__ = ["find_rotation"]

_NAME = "apply_rotary_pos_emb"


def find_rotation(module: nn.Module) -> Swap | Refused | None:
    """How the rotation in an attention module is replaced; None for modules without one."""
    forward = innermost(type(module))
    if _NAME not in getattr(forward, "__code__", find_rotation.__code__).co_names:
        return None
    if reason := overridden(module):
        return Refused(reason)
    original = forward.__globals__.get(_NAME)
    if original is None or not _rotates(original):
        return Refused(f"{_NAME} of {forward.__module__} computes something else than the rotation of halves")
    again = exchanged(type(module).forward, forward, copied(forward, {_NAME: partial(_rotate, original)}))
    if again is None:
        return Refused(f"decorators of {type(module).__name__}.forward hide what they call")
    put = partial(put_forward, module, _attention(again))
    heads = _heads(module)
    return Swap("rotary", put, None if heads is None else partial(_scene, *heads))


def _heads(module: nn.Module) -> tuple[int, int, int, int] | None:
    """(heads, key-value heads, width of a head, of its angles), where a module says so."""
    config, width = getattr(module, "config", None), getattr(module, "head_dim", None)
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or not isinstance(width, int):
        return None
    angles = int(width * float(getattr(config, "partial_rotary_factor", None) or 1.0))
    return heads, getattr(config, "num_key_value_heads", None) or heads, width, angles


def _scene(heads: int, kv_heads: int, width: int, angles: int, *, dtype: torch.dtype) -> None:
    cos, sin = (torch.empty(1, TOKENS, angles, dtype=dtype, device="meta") for _ in range(2))

    def turned(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin)

    forth_and_back(turned, (1, TOKENS, heads, width), (1, TOKENS, kv_heads, width), dtype=dtype)


def _rotates(original: Callable[..., Any]) -> bool:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 5, 8), (2, 1, 5, 8), (1, 5, 8), (1, 5, 8))
    q, k, cos, sin = (torch.randn(shape, generator=generator) for shape in shapes)
    return alike(lambda: tuple(original(q, k, cos, sin)), rotary_reference(q, k, cos, sin))


def _attention(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The attention of one module, which does not keep an input that can be computed again."""

    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        with not_kept(args[0] if args else kwargs.get("hidden_states"), module):
            return forward(module, *args, **kwargs)

    return run


def _rotate(
    original: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    if args or kwargs.get("unsqueeze_dim", 1) != 1 or set(kwargs) - {"unsqueeze_dim"}:
        result: tuple[Tensor, Tensor] = original(q, k, cos, sin, *args, **kwargs)
        return result
    return rotary(q, k, cos, sin)
