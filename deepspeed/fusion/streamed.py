"""Linear layers of few rows, as generation has them: their weights are streamed, those of one input in one launch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.fusion.equivalence import is_plain, only_ours
from deepspeed.fusion.feed_forward import FeedForward
from deepspeed.fusion.packed_linear import PackedLinear, join
from deepspeed.fusion.shared_input import input_groups
from deepspeed.ops.generate.packed import packed_linear
from deepspeed.ops.generate.streaming import MOST_ROWS, streamed_gated, streamed_linear
from deepspeed.transformers.replacement import Swap, Undo, put_forward, replacement


def find_streams(model: nn.Module, *, joins: bool = False) -> Iterator[tuple[str, nn.Module, Swap]]:
    """(name, module, how it is replaced) for each module whose layers can be streamed; serves generation only.

    Comes after the other kinds: gated feed-forward layers are those that were replaced already. `joins`: packed
    weights may move in memory, so that those of one input lie in one.
    """
    taken: set[int] = set()
    known: dict[type, list[tuple[str, ...]]] = {}
    for name, module in model.named_modules():
        gate = _gated(module)
        if gate is not None:
            taken.update(id(module._modules[part]) for part in ("gate_proj", "up_proj"))
            yield (
                name,
                module,
                Swap("weights of gate and up streamed", partial(_put_gated, module, gate), serves="infer"),
            )
            continue
        if type(module) not in known:
            known[type(module)] = list(input_groups(type(module)))
        for layers, names in _alike(module, known[type(module)], joins=joins):
            taken.update(map(id, layers))
            packed = isinstance(layers[0], PackedLinear)
            what = f"{', '.join(names)} {'joined' if packed else 'streamed together'}"
            yield name, module, Swap(what, partial(_put_joined if packed else _put_all, layers), serves="infer")
    for name, module in model.named_modules():
        if is_plain(module) and id(module) not in taken:
            yield name, module, Swap("weight streamed", partial(_put_all, [module]), serves="infer")


def _alike(
    module: nn.Module, groups: Sequence[tuple[str, ...]], *, joins: bool
) -> Iterator[tuple[list[Any], tuple[str, ...]]]:
    """Layers of a module that read one input, and their names: the most plain ones, and the most packed ones."""
    for fits in (is_plain, _is_joinable) if joins else (is_plain,):
        children = {key: child for key, child in module.named_children() if fits(child)}
        names = max((tuple(key for key in names if key in children) for names in groups), key=len, default=())
        layers = [children[key] for key in names]
        if len(layers) > 1 and len({_form(layer) for layer in layers}) == 1:
            yield layers, names


def _is_joinable(layer: nn.Module) -> bool:
    return (
        isinstance(layer, PackedLinear)
        and not layer.packed_transposed
        and layer.rounded_input is None
        and replacement(layer) is None
        and only_ours(layer)
    )


def _form(layer: nn.Module) -> Hashable:
    """What packed weights of one memory have in common; one for all plain layers."""
    if not isinstance(layer, PackedLinear):
        return None
    mode, shape, *others = layer.packed_mode
    return mode, shape[1], *others, layer.packed_dtype, layer.packed.data.device


def _gated(module: nn.Module) -> FeedForward | None:
    """The activation of a gated layer that was replaced, if its parts are plain."""
    found = getattr(replacement(module), "__self__", None)
    parts = [module._modules.get(part) for part in ("gate_proj", "up_proj")]
    plain = all(part is not None and is_plain(part) and part.bias is None for part in parts)
    return found if isinstance(found, FeedForward) and plain else None


def _put_gated(module: nn.Module, gate: FeedForward) -> Undo:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or torch.is_grad_enabled() or _rows(args[0]) > MOST_ROWS:
            return gate.apart(self, *args, **kwargs)
        return self.down_proj(streamed_gated(args[0], self.gate_proj.weight, self.up_proj.weight, gate.kind))

    before = module.__dict__["forward"]
    put_forward(module, run)

    def undo() -> None:
        module.__dict__["forward"] = before

    return undo


def _put_all(layers: Sequence[nn.Linear]) -> Undo:
    def products(x: Tensor) -> list[Tensor] | None:
        return streamed_linear(x, [each.weight for each in layers], [each.bias for each in layers])

    return _put_together(layers, products)


def _put_joined(layers: Sequence[PackedLinear]) -> Undo:
    whole = join(layers)
    sizes = [layer.packed.shape[0] for layer in layers]
    places = [layer.packed.data.data_ptr() for layer in layers]

    def products(x: Tensor) -> list[Tensor] | None:
        if [layer.packed.data.data_ptr() for layer in layers] != places:
            return None  # they have been moved
        found = packed_linear(x, whole).split(sizes, -1)
        return [part if each.bias is None else part + each.bias for part, each in zip(found, layers, strict=True)]

    return _put_together(layers, products)


def _put_together(layers: Sequence[nn.Module], products: Callable[[Tensor], list[Tensor] | None]) -> Undo:
    together = _Together(products)
    undone = [put_forward(layer, together.forward_of(at)) for at, layer in enumerate(layers)]

    def undo() -> None:
        for each in undone:
            each()

    return undo


class _Together:
    """What layers compute of one input: all of it when the first of them is called."""

    def __init__(self, products: Callable[[Tensor], list[Tensor] | None]) -> None:
        self._products = products
        self._source: weakref.ref[Tensor] | None = None
        self._left: dict[int, Tensor] = {}

    def forward_of(self, at: int) -> Callable[..., Tensor]:
        def run(layer: nn.Module, input: Tensor) -> Tensor:
            if self._source is not None and self._source() is input and at in self._left:
                return self._left.pop(at)
            few = not torch.is_grad_enabled() and _rows(input) <= MOST_ROWS
            found = self._products(input) if few else None
            if found is None:
                result: Tensor = type(layer).forward(layer, input)
                return result
            self._left = dict(enumerate(found))
            self._source = weakref.ref(input)
            return self._left.pop(at)

        return run


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1] if x.shape[-1] else 0
