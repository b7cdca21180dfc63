"""Dropout: ranks draw equal numbers for what all of them hold, and different ones for what is split.

A model is searched for dropout once: modules, attributes and configs with a rate, and calls of torch's functions in the
source of its classes. A rate that is zero then may be set later, so a hook of the model looks at these again.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from deepspeed.parallel.regions import RankGroup, Uncopied
from deepspeed.parallel.rng import RankGenerator
from deepspeed.tensor_parallel.layers import ColumnParallel, RowParallel
from deepspeed.transformers.source import called_on_self, tree_of


def use_rank_generators(model: nn.Module, axis: RankGroup, inside: Sequence[nn.Module] = ()) -> None:
    """Let each rank draw its own numbers for activations that are split: between split layers, or in all of `inside`.

    A model without dropout stays as it is. One whose rates are all zero gets a hook that waits for another rate.
    """
    rates = {(id(rate.holder), rate.name): rate for module in model.modules() for rate in _rates(module)}.values()
    put = functools.partial(_put, model, axis, inside)
    if any(rate() > 0 for rate in rates):
        put()
    elif rates:
        layers = (module for module in model.modules() if isinstance(module, ColumnParallel))
        _LateRates(list(rates), put).wait([model, *itertools.islice(layers, 1)])


class _LateRates(Uncopied):
    """A pre-hook that waits for a rate above zero."""

    def __init__(self, rates: Sequence[_Rate], put: Callable[[], None]) -> None:
        self.rates, self.put = rates, put
        self.handles: list[RemovableHandle] = []

    def wait(self, modules: Sequence[nn.Module]) -> None:
        """Look at the rates before each forward of these: a pipeline calls layers, not the model."""
        self.handles = [module.register_forward_pre_hook(self) for module in modules]

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not module.training or all(rate() <= 0 for rate in self.rates):
            return
        for handle in self.handles:
            handle.remove()
        self.put()


def _put(model: nn.Module, axis: RankGroup, inside: Sequence[nn.Module]) -> None:
    draws = RankGenerator(axis)
    for block in inside:
        block.register_forward_pre_hook(draws.begin)
        block.register_forward_hook(draws.end, always_call=True)
    for outer, layer in () if inside else _with_adapters(model):
        if any(isinstance(getattr(hook, "__self__", None), RankGenerator) for hook in outer._forward_hooks.values()):
            continue  # AutoTP split it before
        # An adapter drops what its layer reads: it is whole before a column layer, and split before a row layer.
        if isinstance(layer, ColumnParallel) and not layer.share.gather_output:
            outer.register_forward_pre_hook(draws.end)
            outer.register_forward_hook(draws.begin)
        elif isinstance(layer, RowParallel):
            outer.register_forward_hook(draws.end, always_call=True)
    model.register_forward_hook(draws.end, always_call=True)  # a forward that fails leaves no state of a rank's own


def _with_adapters(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """(layer with its adapters, layer itself) of all modules that are no part of an adapter."""
    inner: set[int] = set()
    for module in model.modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, nn.Module):
            inner.update(map(id, module.modules()))
            yield module, base
        elif id(module) not in inner:
            yield module, module


@dataclass(frozen=True)
class _Rate:
    """A rate of dropout: an attribute that may change, or a number in the source."""

    holder: Any
    name: str = ""
    number: float = 0.0

    def __call__(self) -> float:
        value = getattr(self.holder, self.name, None) if self.name else self.number
        return value if isinstance(value, float) else 0.0


def _rates(module: nn.Module) -> Iterator[_Rate]:
    """What may drop something in training: a dropout, attributes of a module or its config, calls in its source."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        yield _Rate(module, "p")
    for holder in (module, getattr(module, "config", None)):
        for name, value in getattr(holder, "__dict__", {}).items():
            if "drop" in name and type(value) in (int, float):
                yield _Rate(holder, name)
    for rate in _in_source(type(module)):  # type: ignore[arg-type]  # mypy takes no class of torch's for hashable
        yield _Rate(module, rate) if isinstance(rate, str) else _Rate(module, number=rate)


@functools.cache
def _in_source(kind: Any) -> tuple[str | float, ...]:
    """The rates in calls of dropout functions, in all methods of a class: numbers, or names of attributes of `self`."""
    own = [each for each in kind.__mro__ if not each.__module__.startswith(("torch.", "builtins", "deepspeed."))]
    methods = [inspect.unwrap(value) for each in own for value in vars(each).values() if inspect.isfunction(value)]
    trees = [tree_of(method) for method in methods if any(_is_dropout(name) for name in method.__code__.co_names)]
    calls = [node for tree in trees if tree for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return tuple(rate for call in calls for rate in _of_call(call))


_ATTENTION = "scaled_dot_product_attention"


def _is_dropout(name: str) -> bool:
    return name == _ATTENTION or ("dropout" in name and name.islower())


def _of_call(call: ast.Call) -> Iterator[str | float]:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if not _is_dropout(name) or called_on_self(call) is not None:
        return
    place, keyword, default = (4, "dropout_p", 0.0) if name == _ATTENTION else (1, "p", 0.5)
    named = (each.value for each in call.keywords if each.arg == keyword)
    rate = call.args[place] if len(call.args) > place else next(named, ast.Constant(default))
    for node in ast.walk(rate):
        if isinstance(node, ast.Constant) and isinstance(node.value, float):
            yield node.value
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            yield node.attr
