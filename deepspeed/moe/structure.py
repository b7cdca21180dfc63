"""What an expert computes, read from its code, so that all experts of a rank run as one: `read`.

[Note: experts as one] An expert is any module. If it is made of linear layers and of functions that treat every row
alike, torch.fx can tell, and its steps run over the rows of all experts at once with a grouped product in place of
each linear layer. Anything else is called expert by expert, which is right for every module.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from deepspeed.ops.grouped import Groups, grouped_linear

__all__ = ["Structure", "lay_side_by_side", "read", "stacked"]

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


class Structure:
    """The steps of one expert, to be run over the rows of many that are built alike."""

    def __init__(self, graph: fx.Graph, linears: Sequence[str]) -> None:
        self._graph = graph
        self._linears = linears

    def run(self, experts: Sequence[nn.Module], rows: Tensor, groups: Groups) -> Tensor | None:
        """[rows, out]; None if the experts are not, or no longer, built as this one was."""
        layers = {name: self._layers(experts, name) for name in self._linears}
        if any(found is None for found in layers.values()):
            return None
        values: dict[fx.Node, Any] = {}

        def value(node: fx.Node) -> Any:
            return values[node]

        for node in self._graph.nodes:
            args = fx.map_arg(node.args, value)
            kwargs = fx.map_arg(node.kwargs, value)
            if node.op == "placeholder":
                values[node] = rows
            elif node.op == "call_module" and node.target in layers:
                values[node] = _all_at_once(args[0], layers[node.target] or [], groups)
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

    @staticmethod
    def _layers(experts: Sequence[nn.Module], name: str) -> list[nn.Linear] | None:
        found: list[Any] = [expert.get_submodule(name) for expert in experts]
        alike = all(_plain(layer) and _shape(layer) == _shape(found[0]) for layer in found)
        return found if alike else None


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
            if _plain(module):
                linears.append(node.target)
            elif type(module) not in _MODULES or _watched(module):
                return None
        elif not _allowed(node):
            return None
    return Structure(graph, linears) if linears else None


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
    hooks: tuple[Any, ...] = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(hooks)


def _shape(layer: Any) -> tuple[Any, ...]:
    return layer.weight.shape, layer.weight.dtype, None if layer.bias is None else layer.bias.dtype


def _all_at_once(rows: Tensor, layers: Sequence[nn.Linear], groups: Groups) -> Tensor:
    weight = stacked([layer.weight for layer in layers])
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return grouped_linear(rows, weight, groups, stacked(biases) if biases else None)


def stacked(params: Sequence[Tensor]) -> Tensor:
    """[n, …]: the tensors as one, without a copy if they lie in one memory at equal distances."""
    step = _distance(params)
    if step is None:
        return torch.stack(list(params))
    result: Tensor = _Adjacent.apply(step, *params)  # type: ignore[no-untyped-call]
    return result


@torch.no_grad()
def lay_side_by_side(params: Sequence[nn.Parameter]) -> None:
    """Move tensors that are alike into one memory; those that have no values of their own stay as they are."""
    first = params[0]
    alike = {(each.shape, each.dtype, each.device) for each in params}
    if len(params) < 2 or len(alike) > 1 or first.is_meta or not first.numel() or _distance(params) == first.numel():
        return
    for each, home in zip(params, torch.stack(list(params)).unbind(), strict=True):
        each.data = home


def _distance(params: Sequence[Tensor]) -> int | None:
    """Elements between two neighbours that lie in one memory in order; None if they do not."""
    first = params[0]
    if not all(each.is_contiguous() for each in params):
        return None
    if len(params) == 1:
        return first.numel()
    storage, at = first.untyped_storage().data_ptr(), [int(each.storage_offset()) for each in params]
    step = at[1] - at[0]
    even = all(here + step == after for here, after in pairwise(at))
    same = all(each.untyped_storage().data_ptr() == storage for each in params)
    return step if even and same and step >= first.numel() else None


class _Adjacent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: int, *params: Tensor) -> Tensor:
        first = params[0].detach()
        return first.as_strided((len(params), *first.shape), (step, *first.stride()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *grads[0].unbind())
