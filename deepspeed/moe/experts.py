"""`Experts`: the experts that one rank holds, copies of one module, computed as one where their code allows it.

[Note: experts as one] An expert is any module. If it is made of linear layers and of functions that treat every row
alike, torch.fx can tell, and its steps run over the rows of all experts at once with a grouped product in place of
each linear layer. Anything else is called expert by expert, which is right for every module.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from deepspeed.ops.adjacent import lay_side_by_side, merged, stacked
from deepspeed.ops.grouped import Groups, grouped_linear
from deepspeed.ops.model.gated import halves
from deepspeed.ops.model.linear import takes

__all__ = ["Experts"]


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
_PLAIN = (bool, int, float, str, type(None), FunctionType, BuiltinFunctionType)
_TORCHS = frozenset(vars(nn.Module()))  # attributes that every module has
_METHODS = {"relu", "tanh", "sigmoid", "square", "mul", "add", "sub", "div", "neg", "pow", "clamp"}


@dataclass(frozen=True)
class GroupedProduct:
    """Linear layers that read the same rows: where their weights lie side by side, they are one product."""

    nodes: tuple[fx.Node, ...]
    gate: tuple[fx.Node, fx.Node, str] | None = None
    """(activation, multiplication, kind) if all that is done with two layers is act(first) · second."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(str(node.target) for node in self.nodes)


Kind = tuple[type[nn.Module], dict[str, Any]]
"""A class of modules, and attributes of plain values: code that reads one of these leaves its value in the steps."""


class _FoundModule(NamedTuple):
    """A module of an expert as it was when it was looked up."""

    module: nn.Module
    attributes: dict[str, Any]
    kind: Kind
    children: list[nn.Module]

    @classmethod
    def of(cls, module: nn.Module) -> _FoundModule:
        own = {} if type(module) is nn.Linear else vars(module)
        plain = {name: value for name, value in own.items() if name not in _TORCHS and isinstance(value, _PLAIN)}
        return cls(module, vars(module), (type(module), plain), [*module._modules.values()])  # type: ignore[list-item]

    def changed(self) -> bool:
        """True if it may do something else now, or somebody listens; asked at every call, so without any detour."""
        now, (kind, plain) = self.attributes, self.kind
        if type(self.module) is not kind or _watched(now):
            return True
        if self.children and [*now["_modules"].values()] != self.children:
            return True
        return bool(plain) and any(name not in now or now[name] != value for name, value in plain.items())


class ExpertGraph:
    """The steps of one expert, to be run over the rows of many that are built alike."""

    def __init__(self, graph: fx.Graph, products: Sequence[GroupedProduct], kinds: Mapping[str, Kind]) -> None:
        """`kinds`: of the modules of the expert that was read, by path."""
        self._graph = graph
        self._products = products
        self._kinds = kinds
        self._experts: list[nn.Module] = []
        self._found: list[_FoundModule] = []
        self._layers: dict[str, list[Any]] = {}  # the linear layers of all experts by path

    def __deepcopy__(self, _: Any) -> ExpertGraph:
        return ExpertGraph(self._graph, self._products, self._kinds)  # the copies are looked up again

    def parameters(self, expert: nn.Module) -> list[nn.Parameter]:
        """Those of an expert's linear layers, in the order in which they are best laid side by side."""
        found = []
        for product in self._products:
            layers: list[Any] = [expert.get_submodule(name) for name in product.names]
            found += [layer.weight for layer in layers]
            found += [layer.bias for layer in layers if layer.bias is not None]
        return list(dict.fromkeys(found))

    def fits(self, experts: Sequence[nn.Module]) -> bool:
        """True while the experts are built as the one that was read, and nobody listens to a module of theirs."""
        same = self._experts == experts and not any(each.changed() for each in self._found)
        return same or self._look_up(experts)

    def _look_up(self, experts: Sequence[nn.Module]) -> bool:
        found = [{name: _FoundModule.of(each) for name, each in expert.named_modules()} for expert in experts]
        for modules in found:
            if {name: each.kind for name, each in modules.items()} != self._kinds:
                return False
        names = [name for product in self._products for name in product.names]
        layers = {name: [modules[name].module for modules in found] for name in names}
        alike = all(_shape(layer) == _shape(row[0]) for row in layers.values() for layer in row)
        known = [each for modules in found for each in modules.values()]
        if not alike or any(each.changed() for each in known):
            return False
        self._experts, self._found, self._layers = list(experts), known, layers
        return True

    def run(self, rows: Tensor, groups: Groups) -> Tensor:
        """[rows, out] of the experts that it fits."""
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
                values[node] = self._experts[0].get_submodule(node.target)(*args, **kwargs)
            elif node.op == "call_function":
                values[node] = node.target(*args, **kwargs)
            elif node.op == "call_method":
                values[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
            else:
                result: Tensor = args[0]
                return result
        raise AssertionError("a graph has an output")


def _compute(
    product: GroupedProduct, layers: Mapping[str, list[Any]], rows: Tensor, groups: Groups
) -> dict[fx.Node, Any]:
    """What the layers of a product make of rows, and what follows of it where that is one step with it."""
    found = [layers[name] for name in product.names]
    weights = [_own(each, "weight") for each in found]
    weight = merged(list(zip(*weights, strict=True))) if len(found) > 1 else None
    if weight is None:
        return {
            node: grouped_linear(rows, stacked(each), groups, _bias(layers[name]))
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


def read(expert: nn.Module) -> ExpertGraph | None:
    """The structure of an expert; None if its steps cannot be traced, or do not treat every row alike."""
    graph = _traced(expert)
    if graph is None or sum(node.op == "placeholder" for node in graph.nodes) != 1:
        return None
    linears = []
    for node in graph.nodes:
        if node.op == "call_module":
            module = expert.get_submodule(node.target)
            if type(module) is nn.Linear and len(node.args) == 1:
                linears.append(node.target)
            elif type(module) not in _MODULES:
                return None
        elif not _allowed(node):
            return None
    if not linears or any(_watched(vars(module)) for module in expert.modules()):
        return None
    kinds = {name: _FoundModule.of(module).kind for name, module in expert.named_modules()}
    return ExpertGraph(graph, _products(expert, graph, linears), kinds)


def _traced(expert: nn.Module) -> fx.Graph | None:
    """The steps of an expert; None if it has others in training than in evaluation, or they cannot be traced."""
    modes = {module: module.training for module in expert.modules()}
    graphs = []
    try:
        for training in (False, True):
            for module in modes:
                module.training = training
            graphs.append(_Tracer().trace(expert))
    except Exception:  # noqa: BLE001 - whatever a module's code raises when it is given a stand-in for a tensor
        return None
    finally:
        for module, training in modes.items():
            module.training = training
    return graphs[0] if str(graphs[0]) == str(graphs[1]) else None


def _products(expert: nn.Module, graph: fx.Graph, linears: Sequence[str]) -> list[GroupedProduct]:
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
            products += [GroupedProduct((node,)) for node in nodes]
    return products


def _gated_or_not(expert: nn.Module, nodes: Sequence[fx.Node]) -> GroupedProduct:
    widths = {expert.get_submodule(str(node.target)).out_features for node in nodes}
    if len(nodes) == 2 and len(widths) == 1 and all(len(node.users) == 1 for node in nodes):
        for first, second in (nodes, nodes[::-1]):
            (act,), (times,) = first.users, second.users
            kind = _kind_of(expert, act)
            if kind and list(act.users) == [times] and _multiplies(times) and set(times.args) == {act, second}:
                return GroupedProduct((first, second), (act, times, kind))
    return GroupedProduct(tuple(nodes))


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
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not any(True for _ in m.children())


def _watched(attributes: Mapping[str, Any]) -> Any:
    """True for a module with hooks or with a forward of its own, which steps that run past its call would leave out."""
    return (
        attributes["_forward_hooks"]
        or attributes["_forward_pre_hooks"]
        or attributes["_backward_hooks"]
        or attributes["_backward_pre_hooks"]
        or "forward" in attributes
    )


def _shape(layer: Any) -> tuple[Any, ...]:
    return layer.weight.shape, layer.weight.dtype, None if layer.bias is None else layer.bias.dtype


class Experts(nn.Module):
    """Copies of an expert; each parameter says by `allreduce` and `group_name` that it is one of an expert."""

    def __init__(self, expert: nn.Module, num_local_experts: int = 1, expert_group_name: str | None = None) -> None:
        super().__init__()
        self.deepspeed_experts = nn.ModuleList(_copy_of(expert) for _ in range(num_local_experts))
        self.num_local_experts = num_local_experts
        self.group_name = expert_group_name
        self._structure = read(self.deepspeed_experts[0])
        # Stage 3 gathers the experts of a rank together: they are used together, whichever tokens come.
        self._z3_leaf = True
        self._gather_memory()
        for param in self.deepspeed_experts.parameters():
            param.allreduce = False  # type: ignore[attr-defined]  # what is published, and what scripts look at
            param.group_name = expert_group_name  # type: ignore[attr-defined]

    def forward(self, inputs: Tensor, groups: Groups | None = None) -> Tensor:
        """[groups, local experts, capacity, M] → the same: every expert computes its slice of the second dim.

        With `groups` the input is [rows, M], and each expert computes its group of rows.
        """
        if groups is not None:
            return self._of_rows(inputs, groups)
        by_expert = inputs.transpose(0, 1)  # [local experts, groups, capacity, M]
        equal = Groups(self.num_local_experts, length=by_expert[0, ..., 0].numel())
        out = self._of_rows(by_expert.reshape(-1, inputs.shape[-1]), equal)
        return out.view(*by_expert.shape[:-1], out.shape[-1]).transpose(0, 1)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Experts:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # moves and casts parameters one by one
        self._gather_memory()
        return self

    def _gather_memory(self) -> None:
        """Lay the parameters of all experts side by side, so that a grouped product needs no copy."""
        if self._structure is not None:
            lay_side_by_side([self._structure.parameters(expert) for expert in self.deepspeed_experts])

    @property
    def as_one(self) -> bool:
        """True if the experts need not be separated by the host; see [Note: experts as one]."""
        return self._structure is not None

    def _of_rows(self, rows: Tensor, groups: Groups) -> Tensor:
        """[rows, M]: each expert computes its group."""
        experts = list(self.deepspeed_experts)
        if self._structure is not None and not self._structure.fits(experts):
            self._structure = read(experts[0])  # they were changed
            if self._structure is not None and not self._structure.fits(experts):
                self._structure = None  # in different ways: from now on one by one
        if self._structure is not None:
            return self._structure.run(rows, groups)
        parts = rows.split(groups.sizes())
        return torch.cat([_first(expert(part)) for expert, part in zip(experts, parts, strict=True)])


def _copy_of(expert: nn.Module) -> nn.Module:
    """A copy with the marks of its parameters, such as that of split ones, which torch does not copy."""
    made = copy.deepcopy(expert)
    for param, given in zip(made.parameters(), expert.parameters(), strict=True):
        for name, mark in vars(given).items():
            setattr(param, name, mark)
    return made


def _first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """An expert may return a bias beside its output, which is not used."""
    return output[0] if isinstance(output, tuple) else output
