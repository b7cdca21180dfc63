"""What an expert computes, read from its code, so that all experts of a rank run as one: `read`.

[Note: experts as one] An expert is any module. If it is made of linear layers and of functions that treat every row
alike, torch.fx can tell, and its steps run over the rows of all experts at once with a grouped product in place of
each linear layer. Anything else is called expert by expert, which is right for every module.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from deepspeed.moe.side_by_side import merged, stacked
from deepspeed.ops.grouped import Groups, grouped_linear
from deepspeed.ops.model.device import takes
from deepspeed.ops.model.gated import halves

__all__ = ["Structure", "read"]

# Modules without parameters that treat every element, or every row, alike.
_MODULES = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Softsign,
    nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid, nn.Dropout, nn.Identity,
)  # fmt: skip
_FUNCTIONS = {
    operator.add, operator.mul, operator.sub, operator.truediv, operator.neg, operator.pow,
    torch.add, torch.mul, torch.sub, torch.div, torch.relu, torch.tanh, torch.sigmoid, torch.square, torch.clamp,
    functional.relu, functional.gelu, functional.silu, functional.mish, functional.tanh, functional.sigmoid,
    functional.softplus, functional.leaky_relu, functional.elu, functional.relu6, functional.hardswish,
}  # fmt: skip
_METHODS = {"relu", "tanh", "sigmoid", "square", "mul", "add", "sub", "div", "neg", "pow", "clamp"}


@dataclass(frozen=True)
class Product:
    """Linear layers that read the same rows: where their weights lie side by side, they are one product."""

    nodes: tuple[fx.Node, ...]
    gate: tuple[fx.Node, fx.Node, str] | None = None
    """(activation, multiplication, kind) if all that is done with two layers is act(first) · second."""

    @property
    def names(self) -> tuple[str, ...]:
        """The layers."""
        return tuple(str(node.target) for node in self.nodes)


class Structure:
    """The steps of one expert, to be run over the rows of many that are built alike."""

    def __init__(self, graph: fx.Graph, products: Sequence[Product]) -> None:
        self._graph = graph
        self._products = products
        self._layers: Layers | None = None

    def __deepcopy__(self, _: Any) -> Structure:
        return Structure(self._graph, self._products)  # the layers are found again, in the copies

    def parameters(self, expert: nn.Module) -> list[nn.Parameter]:
        """Those of an expert's linear layers, in the order in which they are best laid side by side."""
        found = []
        for product in self._products:
            layers: list[Any] = [expert.get_submodule(name) for name in product.names]
            found += [layer.weight for layer in layers]
            found += [layer.bias for layer in layers if layer.bias is not None]
        return list(dict.fromkeys(found))

    def run(self, experts: Sequence[nn.Module], rows: Tensor, groups: Groups) -> Tensor | None:
        """[rows, out]; None if the experts are not, or no longer, built as this one was."""
        if self._layers is None or not self._layers.hold(experts):
            self._layers = Layers.of(experts, [name for product in self._products for name in product.names])
        if self._layers is None:
            return None
        values: dict[fx.Node, Any] = {}

        def value(node: fx.Node) -> Any:
            return values[node]

        products = {node: product for product in self._products for node in product.nodes}
        for node in self._graph.nodes:
            if node in values:
                continue
            args = fx.map_arg(node.args, value)
            kwargs = fx.map_arg(node.kwargs, value)
            if node.op == "placeholder":
                values[node] = rows
            elif node in products:
                values.update(_compute(products[node], self._layers, args[0], groups))
            elif node.op == "call_module":
                values[node] = experts[0].get_submodule(node.target)(*args, **kwargs)
            elif node.op == "call_function":
                values[node] = node.target(*args, **kwargs)
            elif node.op == "call_method":
                values[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
            else:
                result: Tensor = args[0]
                return result
        raise AssertionError("a graph has an output")


class Layers:
    """The linear layers of all experts by name, looked up once and looked after at every call."""

    def __init__(self, experts: Sequence[nn.Module], named: Mapping[str, list[tuple[nn.Module, str]]]) -> None:
        self._experts = list(experts)
        self._places = [place for places in named.values() for place in places]
        self._found: list[Any] = [owner._modules[name] for owner, name in self._places]
        self.named: dict[str, list[Any]] = {
            name: [owner._modules[last] for owner, last in places] for name, places in named.items()
        }

    @classmethod
    def of(cls, experts: Sequence[nn.Module], names: Sequence[str]) -> Layers | None:
        """None if these are not plain linear layers of equal shapes."""
        places = {}
        for name in names:
            above, _, last = name.rpartition(".")
            places[name] = [(expert.get_submodule(above), last) for expert in experts]
        made = cls(experts, places)
        if not made.hold(experts):
            return None
        alike = all(_shape(layer) == _shape(found[0]) for found in made.named.values() for layer in found)
        return made if alike else None

    def hold(self, experts: Sequence[nn.Module]) -> bool:
        """True while they are the layers of these experts, and nobody listens to one."""
        return self._experts == list(experts) and all(
            _plain(layer) and owner._modules.get(name) is layer
            for (owner, name), layer in zip(self._places, self._found, strict=True)
        )


def _compute(product: Product, layers: Layers, rows: Tensor, groups: Groups) -> dict[fx.Node, Any]:
    """What the layers of a product make of rows, and what follows of it where that is one step with it."""
    found = [layers.named[name] for name in product.names]
    weights = [_own(each, "weight") for each in found]
    weight = merged(list(zip(*weights, strict=True))) if len(found) > 1 else None
    if weight is None:
        return {
            node: grouped_linear(rows, stacked(each), groups, _bias(layers.named[name]))
            for node, name, each in zip(product.nodes, product.names, weights, strict=True)
        }
    biases = [bias for each in found if (bias := _bias(each)) is not None]
    both = grouped_linear(rows, weight, groups, torch.cat(biases, dim=1) if biases else None)
    if product.gate is not None and takes(both):
        act, times, kind = product.gate
        return {**dict.fromkeys((*product.nodes, act)), times: halves(both, kind)}
    return dict(zip(product.nodes, both.split([each[0].out_features for each in found], dim=-1), strict=True))


def _bias(layers: Sequence[nn.Linear]) -> Tensor | None:
    """All have one, or none has: they are alike."""
    return None if layers[0].bias is None else stacked(_own(layers, "bias"))


def _own(layers: Sequence[nn.Linear], name: str) -> list[Any]:
    """A parameter of each, past torch's own way to attributes, which takes longer than all else that the host does."""
    return [layer._parameters[name] for layer in layers]


def read(expert: nn.Module) -> Structure | None:
    """The structure of an expert; None if its steps cannot be told, or do not treat every row alike."""
    try:
        graph = _Tracer().trace(expert)
    except Exception:  # noqa: BLE001 - whatever a module's code raises when it is given a stand-in for a tensor
        return None
    if sum(node.op == "placeholder" for node in graph.nodes) != 1:
        return None
    linears = []
    for node in graph.nodes:
        if node.op == "call_module":
            module = expert.get_submodule(node.target)
            if _plain(module) and len(node.args) == 1:
                linears.append(node.target)
            elif type(module) not in _MODULES or _watched(module):
                return None
        elif not _allowed(node):
            return None
    return Structure(graph, _products(expert, graph, linears)) if linears else None


def _products(expert: nn.Module, graph: fx.Graph, linears: Sequence[str]) -> list[Product]:
    """Each linear layer in one product; those that read the same rows are together."""
    readers: dict[fx.Node, list[fx.Node]] = {}
    called = [node for node in graph.nodes if node.op == "call_module" and node.target in linears]
    for node in called:
        readers.setdefault(node.args[0], []).append(node)
    products = []
    for nodes in readers.values():
        layers: list[Any] = [expert.get_submodule(str(node.target)) for node in nodes]
        once = all(sum(other.target == node.target for other in called) == 1 for node in nodes)
        if len(nodes) > 1 and once and len({layer.bias is None for layer in layers}) == 1:
            products.append(_gated_or_not(expert, nodes))
        else:
            products += [Product((node,)) for node in nodes]
    return products


def _gated_or_not(expert: nn.Module, nodes: Sequence[fx.Node]) -> Product:
    """The product of some layers; two of them may be gate and value, and then the gate is the first."""
    widths = {expert.get_submodule(str(node.target)).out_features for node in nodes}
    if len(nodes) == 2 and len(widths) == 1 and all(len(node.users) == 1 for node in nodes):
        for first, second in (nodes, nodes[::-1]):
            (act,), (times,) = first.users, second.users
            kind = _kind_of(expert, act)
            if kind and list(act.users) == [times] and _multiplies(times) and set(times.args) == {act, second}:
                return Product((first, second), (act, times, kind))
    return Product(tuple(nodes))


def _multiplies(node: fx.Node) -> bool:
    return node.target in (operator.mul, torch.mul, "mul") and len(node.args) == 2 and not node.kwargs


def _kind_of(expert: nn.Module, node: fx.Node) -> str | None:
    """Which of the activations of `halves` a step is."""
    module = expert.get_submodule(str(node.target)) if node.op == "call_module" else None
    if type(module) is nn.SiLU or (node.target is functional.silu and not node.kwargs):
        return "silu"
    if type(module) is nn.GELU or node.target is functional.gelu:
        told = getattr(module, "approximate", node.kwargs.get("approximate", "none"))
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(str(told))
    return None


def _allowed(node: fx.Node) -> bool:
    if node.op == "call_function":
        return node.target in _FUNCTIONS
    if node.op == "call_method":
        return node.target in _METHODS
    if node.op == "output":
        return isinstance(node.args[0], fx.Node)
    return node.op == "placeholder"


class _Tracer(fx.Tracer):
    """Goes into modules until it finds one without children."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not any(True for _ in m.children())


def _plain(module: nn.Module) -> bool:
    return type(module) is nn.Linear and not _watched(module)


def _watched(module: nn.Module) -> bool:
    """True if somebody listens to this module, who would not be told."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _shape(layer: Any) -> tuple[Any, ...]:
    return layer.weight.shape, layer.weight.dtype, None if layer.bias is None else layer.bias.dtype
