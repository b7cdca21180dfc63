"""Causal masks of Transformers' models, made without asking the device whether sequences are packed.

A model that is given no positions counts them itself, and then looks through them for places where another sequence
begins. The host waits for the answer in every forward, with nothing queued behind it for the device. Positions that a
model has counted have no such places: for these the question is left out, and for any that are given it is asked.
"""

from __future__ import annotations

import ast
import inspect
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.fusion.functions import copied, exchanged, innermost, tree_of
from deepspeed.fusion.likeness import attempt, overridden
from deepspeed.fusion.swap import Refused, Swap, put_whole

__all__ = ["find_packing"]

Mask = Callable[..., Any]

_MASKS = ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask")
_POSITIONS = "position_ids"


def find_packing(module: nn.Module) -> Swap | Refused | None:
    """How a model's mask is made; None for modules that make none, or that ask no question."""
    forward: Any = type(module).forward
    inner = innermost(type(module))
    names = [name for name in _MASKS if name in getattr(inner, "__code__", find_packing.__code__).co_names]
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
