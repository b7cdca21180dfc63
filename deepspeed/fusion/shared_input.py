"""Linear layers of a module that read one input, as queries, keys and values do: their gradients of it in one sum.

Which layers these are is read in the code of the module's class: `self.layer(name)` for several layers and one name
that no line between them assigns. The code stays as it is. While it runs, the layers have a forward that computes all
of them when the first is called, and hands the others' results to their calls with the same tensor.

Layers whose products are of 8 bits are taken together as well: the sum of their gradients is then one product.
"""

from __future__ import annotations

import ast
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.fusion.equivalence import FORWARD, differentiated, fits, is_plain, overridden, watched_everywhere
from deepspeed.fusion.fp8_linear import Fp8FeedForwardLayer, Fp8Products, LastRounded, products_of
from deepspeed.ops.fp8.linear import Scaling
from deepspeed.ops.model.linear import linears
from deepspeed.ops.precompile import forward_and_backward
from deepspeed.transformers.replacement import TOKENS, Refused, Swap, Undo, put_forward, replacement
from deepspeed.transformers.source import called_on_self, innermost, tree_of

Groups = list[tuple[str, ...]]
"""Names of layers that read one input, for each such input of a class."""


def find_inputs(
    module: nn.Module, known: MutableMapping[type, Groups], kept: Callable[[str], bool]
) -> Swap | Refused | None:
    """How layers of a module that read one input are replaced, those whose names are `kept`; None if it has none.

    `known` keeps what was read in the code of classes.
    """
    children = {name: child for name, child in module.named_children() if kept(name)}
    plain = {name for name, child in children.items() if is_plain(child)}
    rounded = {name for name, child in children.items() if products_of(child) is not None}
    done = isinstance(getattr(replacement(module), "__self__", None), (Fp8FeedForwardLayer, _Reader))
    if max(len(plain), len(rounded)) < 2 or done:
        return None
    if type(module) not in known:
        known[type(module)] = list(input_groups(type(module)))
    groups = [
        tuple(name for name in names if name in some) for names in known[type(module)] for some in (plain, rounded)
    ]
    names = max(groups, key=len, default=())
    if len(names) < 2:
        return None
    if replacement(module) is None and (reason := overridden(module)):
        return Refused(reason)
    put, gradients = partial(_put, module, names), f"gradients of {', '.join(names)}"
    if names[0] in plain:
        return Swap(f"{gradients} added by their products", put, serves="train")
    layers = [children[name] for name in names]
    shapes = tuple((layer.out_features, layer.in_features) for layer in layers if isinstance(layer, nn.Linear))
    products = products_of(layers[0])
    assert products is not None, "looked at"
    scene = partial(_scene, products.recent.scaling, shapes)
    return Swap(f"{gradients} in one product of 8 bits", put, scene, serves="train")


def _scene(scaling: Scaling, shapes: Sequence[tuple[int, int]], *, dtype: torch.dtype) -> None:
    products = Fp8Products(LastRounded(scaling))  # its own: other threads are using the model's

    def together(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return tuple(products.several(x, weights, [None] * len(weights)))

    forward_and_backward(together, (TOKENS, shapes[0][1]), *shapes, dtype=dtype)


def _put(module: nn.Module, names: tuple[str, ...]) -> Undo:
    return put_forward(module, _Reader(names, replacement(module) or type(module).forward).run)


class _Reader:
    """A module whose layers of these names read one input."""

    def __init__(self, names: tuple[str, ...], forward: Callable[..., Any]) -> None:
        self.names, self.forward = names, forward

    def run(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; whatever was computed ahead and not used is gone after it."""
        layers = self._layers(module)
        if len(layers) < 2:
            return self.forward(module, *args, **kwargs)
        together = _Together(layers)
        puts = [partial(together.take, at) for at in range(len(layers))]
        before = [layer.__dict__.get("forward") for layer in layers]
        for layer, put in zip(layers, puts, strict=True):
            layer.__dict__["forward"] = put
        try:
            return self.forward(module, *args, **kwargs)
        finally:
            together.drop()
            for layer, put, own in zip(layers, puts, before, strict=True):
                if layer.__dict__.get("forward") is put:
                    layer.__dict__["forward"] = own
                    if own is None:
                        del layer.__dict__["forward"]

    def _layers(self, module: nn.Module) -> list[nn.Linear]:
        """Those that are plain now: others may have been exchanged, wrapped or hooked since they were found."""
        if not torch.is_grad_enabled() or watched_everywhere():
            return []
        found = dict.fromkeys(module._modules.get(name) for name in self.names)
        layers = [layer for layer in found if isinstance(layer, nn.Linear)]
        plain = [layer for layer in layers if is_plain(layer)]
        return plain if len(plain) > 1 else [layer for layer in layers if products_of(layer) is not None]


class _Together:
    """What layers compute of one input, from the first that is called to the last."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._layers = layers
        self._products = products_of(layers[0])
        self._source: weakref.ref[Tensor] | None = None
        self._version = 0
        self._left: dict[int, Tensor] = {}

    def take(self, at: int, input: Tensor) -> Tensor:
        """The result of a layer: one that is there, or of all layers together, or of this one alone."""
        same = self._source is not None and self._source() is input and self._version == input._version
        if same and differentiated(input) and (found := self._left.pop(at, None)) is not None:
            return found
        unused = bool(self._left)
        self.drop()
        # Layers that are not called with one input each are better computed alone, and so is one that is called again.
        if same or unused or not differentiated(input) or not all(fits(layer, input) for layer in self._layers):
            return (FORWARD if self._products is None else self._products.run)(self._layers[at], input)
        compute = linears if self._products is None else self._products.several
        results = compute(input, [layer.weight for layer in self._layers], [layer.bias for layer in self._layers])
        self._source, self._version = weakref.ref(input), input._version
        self._left = dict(enumerate(results))
        return self._left.pop(at)

    def drop(self) -> None:
        """Forget results that nobody took."""
        self._left.clear()


def input_groups(kind: type) -> Iterator[tuple[str, ...]]:
    """Names of modules that lines of a block of a class's forward call with one name that these do not assign."""
    tree = tree_of(innermost(kind))
    for node in ast.walk(tree) if tree is not None else ():
        for block in (getattr(node, field, None) for field in ("body", "orelse", "finalbody")):
            if isinstance(block, list):
                yield from _of_block(block)


def _of_block(block: Sequence[ast.stmt]) -> Iterator[tuple[str, ...]]:
    open_groups: dict[str, dict[str, None]] = {}
    for line in block:
        if isinstance(line, (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr)):
            for layer, argument in _calls(line):
                open_groups.setdefault(argument, {})[layer] = None
        for node in ast.walk(line):  # also of the blocks inside
            if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
                yield tuple(open_groups.pop(node.id, ()))
    yield from (tuple(names) for names in open_groups.values())


def _calls(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(name of a module, argument) of each `self.module(argument)` that is computed for certain."""
    if isinstance(node, (ast.IfExp, ast.BoolOp, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        return
    for child in ast.iter_child_nodes(node):
        yield from _calls(child)
    name = called_on_self(node)
    if name is not None and len(node.args) == 1 and not node.keywords and isinstance(node.args[0], ast.Name):  # type: ignore[attr-defined]
        yield name, node.args[0].id  # type: ignore[attr-defined]
