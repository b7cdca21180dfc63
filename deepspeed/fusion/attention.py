"""Rotary embedding in attention modules, and causal masks made without a question to the device about packing.

A model that is given no positions counts them itself, and then looks through them for places where another sequence
begins. The host waits for the answer in every forward, with nothing queued behind it for the device. Positions that a
model has counted have no such places: for these the question is left out, and for any that are given it is asked.
"""

from __future__ import annotations

import ast
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from deepspeed.fusion.equivalence import alike, attempt, overridden
from deepspeed.fusion.recompute import recomputed_input
from deepspeed.ops.model.rotary import rotary, rotary_reference
from deepspeed.ops.precompile import forward_and_backward
from deepspeed.transformers.attention import MASKS
from deepspeed.transformers.replacement import TOKENS, Refused, Swap, put_forward, put_whole, replacement
from deepspeed.transformers.source import copied, exchanged, innermost, tree_of

Mask = Callable[..., Any]

_POSITIONS = "position_ids"


def find_packing(module: nn.Module) -> Swap | Refused | None:
    """How a model's mask is made; None for modules that make none, or that ask no question."""
    forward: Any = type(module).forward
    inner = innermost(type(module))
    names = [name for name in MASKS if name in getattr(inner, "__code__", find_packing.__code__).co_names]
    if not names or not _counts(inner):
        return None
    config = getattr(module, "config", None)
    known = {name: inner.__globals__.get(name) for name in names}
    masks = {name: mask for name, mask in known.items() if mask is not None and _asks(mask) and _same(mask, config)}
    if not masks:
        return None
    if reason := overridden(module):
        return Refused(reason)
    count = _Count()
    made = copied(inner, {name: partial(_mask, mask, count) for name, mask in masks.items()})
    again = exchanged(forward, inner, made)
    if again is None:
        return Refused(f"decorators of {type(module).__name__}.forward hide what they call")
    place = list(inspect.signature(inner).parameters).index(_POSITIONS) - 1
    run = partial(_run, again, count, place)
    return Swap("causal mask, with no wait for the device", partial(put_whole, module, run))


class _Count(threading.local):
    """Whether the model whose forward this thread is in counts the positions."""

    own = False


def _run(forward: Callable[..., Any], count: _Count, place: int, module: Any, *args: Any, **kwargs: Any) -> Any:
    given = args[place] if len(args) > place else kwargs.get(_POSITIONS)
    before, count.own = count.own, given is None
    try:
        return forward(module, *args, **kwargs)
    finally:
        count.own = before


def _mask(original: Mask, count: _Count, *args: Any, **kwargs: Any) -> Any:
    if count.own:
        kwargs.pop(_POSITIONS, None)
    return original(*args, **kwargs)


def _counts(function: Any) -> bool:
    """Whether a forward counts positions with `arange` where it is given none."""
    tree, absent = tree_of(function), f"{_POSITIONS} is None"
    if tree is None or _POSITIONS not in inspect.signature(function).parameters:
        return False
    return any(
        any(isinstance(inside, ast.Attribute) and inside.attr == "arange" for inside in ast.walk(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == absent
    )


def _asks(mask: Mask) -> bool:
    """Whether a function takes positions, and does without."""
    found = inspect.signature(mask).parameters.get(_POSITIONS)
    return found is not None and found.default is None


def _same(mask: Mask, config: Any) -> bool:
    """Whether counted positions give the mask that none give, on small numbers."""
    hidden, places = torch.zeros(2, 5, 4), torch.arange(5)
    offered = {
        "config": config,
        "inputs_embeds": hidden,
        "input_embeds": hidden,  # of earlier versions, as is the next
        "cache_position": places,
        "attention_mask": None,
        "past_key_values": None,
    }
    given = {name: value for name, value in offered.items() if name in inspect.signature(mask).parameters}
    one, other = attempt(lambda: (mask(**given, position_ids=places.unsqueeze(0)), mask(**given))) or (None, Ellipsis)
    return (one is None and other is None) or (
        isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    )


_NAME = "apply_rotary_pos_emb"


@dataclass(slots=True)
class LateRotation:
    """How one attention module rotates: at once, or later by the function that attends, which writes keys as well."""

    how: Literal["at once", "noted", "later"] = "at once"
    given: tuple[Tensor, ...] | None = None
    """Query and key as they went on: rotated ones where rotations are noted, else with cos and sin."""


def late_rotation(module: nn.Module) -> LateRotation | None:
    """That of a module whose rotation was replaced."""
    found: LateRotation | None = getattr(replacement(module), "late", None)
    return found


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
    late = LateRotation()
    again = exchanged(type(module).forward, forward, copied(forward, {_NAME: partial(_rotate, original, late)}))
    if again is None:
        return Refused(f"decorators of {type(module).__name__}.forward hide what they call")
    put = partial(put_forward, module, _attention(again, late))
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

    forward_and_backward(turned, (1, TOKENS, heads, width), (1, TOKENS, kv_heads, width), dtype=dtype)


def _rotates(original: Callable[..., Any]) -> bool:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 5, 8), (2, 1, 5, 8), (1, 5, 8), (1, 5, 8))
    q, k, cos, sin = (torch.randn(shape, generator=generator) for shape in shapes)
    return alike(lambda: tuple(original(q, k, cos, sin)), rotary_reference(q, k, cos, sin))


def _attention(forward: Callable[..., Any], late: LateRotation) -> Callable[..., Any]:
    """The attention of one module, which does not keep an input that can be computed again."""

    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        with recomputed_input(args[0] if args else kwargs.get("hidden_states"), module):
            return forward(module, *args, **kwargs)

    run.__dict__["late"] = late
    return run


def _rotate(
    original: Callable[..., Any],
    late: LateRotation,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    if args or kwargs.get("unsqueeze_dim", 1) != 1 or set(kwargs) - {"unsqueeze_dim"}:
        result: tuple[Tensor, Tensor] = original(q, k, cos, sin, *args, **kwargs)
        return result
    if late.how == "later":
        late.given = q, k, cos, sin
        return q, k
    found = rotary(q, k, cos, sin)
    if late.how == "noted":
        late.given = found
    return found
