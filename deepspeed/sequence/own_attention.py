"""Attention modules that compute by themselves instead of by Transformers' attention functions.

They get a forward that projects as theirs does and hands queries, keys and values on. Their biases by distance (ALiBi)
belong to keys of whole sequences, so that these are made anew, by the model's own function.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from deepspeed.fusion.swap import put_forward
from deepspeed.sequence.distance_bias import Find, Tables
from deepspeed.sequence.own_forwards import FAMILIES, Attention, Family
from deepspeed.sequence.whole import Whole

__all__ = ["knows", "teach"]

_BY_DISTANCE = {"t5": ("T5Attention",), "mt5": ("MT5Attention",)}
"""Families that call Transformers' functions with biases of pairs, and the classes that learn these."""


def knows(config: Any) -> bool:
    """Whether attention modules of models with such a config can be taught."""
    return getattr(config, "model_type", None) in {*FAMILIES, *_BY_DISTANCE}


def teach(model: Any, attention: Attention, find: Find, stack: ExitStack) -> None:
    """Let the attention modules of a model use an attention function, until the stack is closed."""
    family = FAMILIES.get(model.config.model_type)
    if family is None:
        tables = Tables(find)
        for module in model.modules():
            if type(module).__name__ in _BY_DISTANCE[model.config.model_type]:
                stack.callback(module.register_forward_pre_hook(tables, with_kwargs=True, prepend=True).remove)
        return
    forward = family.forward(attention)
    biases = _Biases(family, model.config.num_attention_heads, find)
    for module in model.modules():
        if type(module).__name__ in family.modules:
            stack.callback(put_forward(module, forward, compiled=forward))
            # before those who take some heads of it
            stack.callback(module.register_forward_pre_hook(biases, with_kwargs=True, prepend=True).remove)


class _Biases:
    """Biases by distance of the whole sequence, in the place of those that a model made of its part."""

    def __init__(self, family: Family, heads: int, find: Find) -> None:
        self._family, self._heads, self._find = family, heads, find
        self._made: WeakKeyDictionary[Whole, Tensor] = WeakKeyDictionary()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        whole = self._find(kwargs.get("attention_mask"))
        given = kwargs.get(self._family.bias)
        if whole is None or whole.length == 0 or given is None:
            return None
        made = self._made.get(whole)
        if made is None or made.dtype != given.dtype:
            made = self._made[whole] = self._family.make(whole, self._heads, given)
        return args, {**kwargs, self._family.bias: made}
