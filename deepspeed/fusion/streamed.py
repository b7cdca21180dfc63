"""Linear layers of few rows, as generation has them: their weights are streamed, those of one input in one launch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed.fusion.equivalence import is_plain, only_ours
from deepspeed.fusion.feed_forward import FeedForward
from deepspeed.fusion.packed_linear import PackedProduct, join
from deepspeed.fusion.shared_input import input_groups
from deepspeed.ops.adjacent import lay_side_by_side, merged
from deepspeed.ops.generate.packed import packed_linear
from deepspeed.ops.generate.streaming import MOST_ROWS, streamed_gated, streamed_linear
from deepspeed.ops.model.gated import halves
from deepspeed.parallel.regions import cut_of
from deepspeed.transformers.replacement import Swap, Undo, own_product, put_forward, put_product, replacement

Products = Callable[[Tensor, bool], "list[Tensor] | None"]
"""(input, whether biases are added) → what some layers give; None where they do not go together now."""


def find_streams(model: nn.Module, *, joins: bool = False) -> Iterator[tuple[str, nn.Module, Swap]]:
    """(name, module, how it is replaced) for each module whose layers can be streamed; serves generation only.

    Comes after the other kinds: gated feed-forward layers are those that were replaced already. `joins`: weights may
    move in memory, so that those of one input lie in one, and many rows take one product.
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
                Swap("weights of gate and up streamed", partial(_put_gated, module, gate, joins), serves="infer"),
            )
            continue
        if type(module) not in known:
            known[type(module)] = list(input_groups(type(module)))
        for layers, names in _alike(module, known[type(module)], joins=joins):
            taken.update(map(id, layers))
            packed = isinstance(layers[0], PackedProduct)
            what = f"{', '.join(names)} {'joined' if packed else 'streamed together'}"
            put = partial(_put_joined, layers) if packed else partial(_put_all, layers, joins)
            yield name, module, Swap(what, put, serves="infer")
    for name, module in model.named_modules():
        if _streams(module) and id(module) not in taken:
            yield name, module, Swap("weight streamed", partial(_put_all, [module], False), serves="infer")


def _alike(
    module: nn.Module, groups: Sequence[tuple[str, ...]], *, joins: bool
) -> Iterator[tuple[list[Any], tuple[str, ...]]]:
    """Layers of a module that read one input, and their names: the most plain ones, and the most packed ones."""
    for fits in (_streams, _is_joinable) if joins else (_streams,):
        children = {key: child for key, child in module.named_children() if fits(child) and _takes_all(child)}
        names = max((tuple(key for key in names if key in children) for names in groups), key=len, default=())
        layers = [children[key] for key in names]
        if len(layers) > 1 and len({_form(layer) for layer in layers}) == 1:
            yield layers, names


def _streams(layer: nn.Module) -> bool:
    """Whether a layer, or this rank's part of it, is a product with its weight as it lies in memory."""
    cut = cut_of(layer)
    if cut is None:
        return is_plain(layer)
    return cut.plain and type(layer).__bases__[-1] is nn.Linear and "product" not in vars(layer)


def _takes_all(layer: nn.Module) -> bool:
    cut = cut_of(layer)
    return cut is None or cut.by_outputs


def _is_joinable(layer: nn.Module) -> bool:
    if not isinstance(layer, PackedProduct) or layer.packed_transposed or layer.rounded_input is not None:
        return False
    cut = cut_of(layer)
    if cut is None:
        return replacement(layer) is None and only_ours(layer)
    return cut.plain and "product" not in vars(layer)


def _form(layer: nn.Module) -> Hashable:
    """What layers of one launch have in common."""
    whole = cut_of(layer) is None
    if not isinstance(layer, PackedProduct):
        return whole
    mode, shape, *others = layer.packed_mode
    return whole, mode, shape[1], *others, layer.packed_dtype, layer.packed.data.device


def _gated(module: nn.Module) -> FeedForward | None:
    """The activation of a gated layer that was replaced, if its parts are plain."""
    found = getattr(replacement(module), "__self__", None)
    parts = [module._modules.get(part) for part in ("gate_proj", "up_proj")]
    plain = all(part is not None and _streams(part) and _takes_all(part) and part.bias is None for part in parts)
    return found if isinstance(found, FeedForward) and plain else None


def _put_gated(module: nn.Module, gate: FeedForward, joins: bool) -> Undo:
    if joins:
        lay_side_by_side([[module.gate_proj.weight, module.up_proj.weight]])  # type: ignore[union-attr,list-item]

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or torch.is_grad_enabled():
            return gate.apart(self, *args, **kwargs)
        weights = self.gate_proj.weight, self.up_proj.weight
        if _rows(args[0]) <= MOST_ROWS:
            return self.down_proj(streamed_gated(args[0], *weights, gate.kind))
        whole = merged([weights])
        if whole is None:
            return gate.apart(self, *args)
        return self.down_proj(halves(functional.linear(args[0], whole[0]), gate.kind))

    before = module.__dict__["forward"]
    put_forward(module, run)

    def undo() -> None:
        module.__dict__["forward"] = before

    return undo


def _put_all(layers: Sequence[nn.Linear], joins: bool) -> Undo:
    if joins:
        lay_side_by_side([[layer.weight for layer in layers]])
        if all(layer.bias is not None for layer in layers):
            lay_side_by_side([[layer.bias for layer in layers]])

    def products(x: Tensor, biased: bool) -> list[Tensor] | None:
        weights = [each.weight for each in layers]
        biases = [each.bias if biased else None for each in layers]
        if _rows(x) <= MOST_ROWS:
            return streamed_linear(x, weights, biases)
        whole = merged([weights]) if len(layers) > 1 else None
        given = [each for each in biases if each is not None]
        bias = merged([given]) if len(given) == len(layers) else None
        if whole is None or bool(given) != (bias is not None):
            return None
        found = functional.linear(x, whole[0], None if bias is None else bias[0])
        return list(found.split([len(each) for each in weights], -1))

    return _Together(products).put(layers)


def _put_joined(layers: Sequence[PackedProduct]) -> Undo:
    whole = join(layers)
    sizes = [layer.packed.shape[0] for layer in layers]
    places = [layer.packed.data.data_ptr() for layer in layers]

    def products(x: Tensor, biased: bool) -> list[Tensor] | None:
        if _rows(x) > MOST_ROWS or [layer.packed.data.data_ptr() for layer in layers] != places:
            return None  # many rows are computed one by one, and so are weights that have been moved
        found = packed_linear(x, whole).split(sizes, -1)
        biases = [each.bias if biased else None for each in layers]
        return [part if bias is None else part + bias for part, bias in zip(found, biases, strict=True)]

    return _Together(products).put(layers)


class _Together:
    """What layers compute of one input: all of it when the first of them is called."""

    def __init__(self, products: Products) -> None:
        self._products = products
        self._source: weakref.ref[Tensor] | None = None
        self._left: dict[int, Tensor] = {}

    def put(self, layers: Sequence[nn.Module]) -> Undo:
        """Let layers compute so."""
        undone = [put_product(layer, partial(self._run, at)) for at, layer in enumerate(layers)]

        def undo() -> None:
            for each in undone:
                each()

        return undo

    def _run(self, at: int, layer: nn.Module, input: Tensor, **options: bool) -> Tensor:
        """`options`: `with_bias`, of a layer that ranks share."""
        if self._source is not None and self._source() is input and at in self._left:
            return self._left.pop(at)
        ours = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        found = self._products(input, options.get("with_bias", True)) if ours else None
        if found is None:
            result: Tensor = own_product(layer)(layer, input, **options)
            return result
        self._left = dict(enumerate(found))
        self._source = weakref.ref(input)
        return self._left.pop(at)


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1] if x.shape[-1] else 0
