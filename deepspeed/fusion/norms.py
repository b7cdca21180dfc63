"""RMS and layer normalisations."""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.errors import UsageError
from deepspeed.fusion.equivalence import only_ours, overridden, same, stand_in, watched_everywhere
from deepspeed.fusion.recompute import recomputable
from deepspeed.ops.model.norm import layer_norm, residual_sum, rms_norm, rms_norm_reference
from deepspeed.ops.precompile import forward_and_backward
from deepspeed.transformers.replacement import (
    TOKENS,
    Refused,
    Swap,
    Undo,
    put_attribute,
    put_forward,
    replacement,
    whole_shape,
)
from deepspeed.transformers.source import (
    assigned,
    called_on_self,
    changed_in_place,
    code_of,
    copied,
    exchanged,
    innermost,
    is_read_from,
    tree_of,
)

Norm = Callable[..., tuple[Tensor, Tensor]]

_SUM = "_residual_sum"
_WIDTH = 8
_EPSILONS = ("variance_epsilon", "eps", "epsilon")
_OFFSETS = (0.0, 1.0)
"""What is added to the weight: some families keep it around zero."""


def find_norm(module: nn.Module) -> Swap | Refused | None:
    """How a normalisation is replaced; None for any other module."""
    if type(module) is nn.LayerNorm:
        return Refused(reason) if (reason := overridden(module)) else _layer_norm(module)
    if "rmsnorm" not in type(module).__name__.lower():
        return None
    return Refused(reason) if (reason := overridden(module)) else _rms_norm(module)


def _layer_norm(module: nn.LayerNorm) -> Swap | Refused:
    if module.weight is None or module.bias is None or len(module.normalized_shape) != 1:
        return Refused("it has no weight, no bias, or normalises several dims")
    norm, width = partial(layer_norm, eps=module.eps), module.normalized_shape[0]
    scene = partial(_scene, norm, width, (width,), (width,))
    return Swap("layer_norm", partial(put_forward, module, _run_layer_norm), scene)


def _rms_norm(module: nn.Module) -> Swap | Refused:
    own = dict(module.named_parameters(recurse=False))
    if set(own) != {"weight"} or any(True for _ in module.children()) or any(True for _ in module.buffers()):
        return Refused("it has other parts than one weight")
    if len(whole_shape(own["weight"])) != 1:
        return Refused("it normalises several dims, or has a weight for several")
    if len(inspect.signature(type(module).forward).parameters) != 2:
        return Refused("it takes other inputs than what it normalises")
    epsilon = next((name for name in _EPSILONS if isinstance(getattr(module, name, None), float)), None)
    if epsilon is None and not isinstance(module, nn.RMSNorm):
        return Refused(f"none of {', '.join(_EPSILONS)} is a number")
    eps = torch.finfo(torch.float32).eps if epsilon is None else getattr(module, epsilon)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator) for shape in ((3, _WIDTH), (_WIDTH,)))
    twin = stand_in(module, {"weight": weight}, {})
    if isinstance(module, nn.RMSNorm):
        twin.__dict__["normalized_shape"] = (_WIDTH,)
    for offset in _OFFSETS:
        expected, _ = rms_norm_reference(x, None, weight, eps, offset)
        if same(type(module).forward, twin, x, expected):
            width = whole_shape(own["weight"])[0]
            scene = partial(_scene, partial(rms_norm, eps=eps, offset=offset), width, (width,))
            return Swap("rms_norm", partial(put_forward, module, _RmsNorm(eps, offset).run), scene)
    return Refused(f"{type(module).__name__} computes something else than an RMS norm")


def _scene(norm: Norm, width: int, *weights: tuple[int], dtype: torch.dtype, summed: bool = False) -> None:
    if summed:

        def behind(x: Tensor, residual: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
            return norm(x, *rest, residual=residual)

        forward_and_backward(behind, (TOKENS, width), (TOKENS, width), *weights, dtype=dtype)
    else:
        forward_and_backward(lambda *inputs: norm(*inputs)[0], (TOKENS, width), *weights, dtype=dtype)


class _RmsNorm:
    """The numbers of one normalisation."""

    def __init__(self, eps: float, offset: float) -> None:
        self.eps, self.offset = eps, offset

    def run(self, module: Any, *args: Any, residual: Any = None, keeps: bool = False, **named: Any) -> Any:
        (hidden_states,) = args or named.values()  # whatever name its class has for it
        norm = partial(rms_norm, eps=self.eps, offset=self.offset)
        if keeps:
            return _kept(norm, hidden_states, module.weight)
        return _summed(norm, hidden_states, residual, module.weight)


def _run_layer_norm(self: Any, input: Tensor, *, residual: Any = None, keeps: bool = False) -> Any:
    norm, weights = partial(layer_norm, eps=self.eps), (self.weight, self.bias)
    return _kept(norm, input, *weights) if keeps else _summed(norm, input, residual, *weights)


def _kept(norm: Norm, x: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
    """(norm(x), x), whose gradients the norm adds up."""
    result, kept = norm(x, *weights, keeps=True)
    return _computable(norm, result, x, *weights), kept


def _summed(norm: Norm, x: Any, residual: Any, *weights: Tensor) -> Any:
    """norm(x); with a `residual` (norm(x + residual), x + residual)."""
    if residual is None:
        return _normalised(norm, x, *weights)
    if not _of_a_kind(x, residual):
        total = residual + x
        return _normalised(norm, total, *weights), total
    result, total = norm(x, *weights, residual=residual)
    return _computable(norm, result, total, *weights), total


def _of_a_kind(x: Any, residual: Any) -> bool:
    """Whether two are tensors that have a sum of their own shape and dtype; code may add numbers, or rows."""
    tensors = isinstance(x, Tensor) and isinstance(residual, Tensor)
    return tensors and (x.shape, x.dtype, x.device) == (residual.shape, residual.dtype, residual.device)


def _normalised(norm: Norm, x: Tensor, *weights: Tensor) -> Tensor:
    return _computable(norm, norm(x, *weights)[0], x, *weights)


def _computable(norm: Norm, result: Tensor, x: Tensor, *weights: Tensor) -> Tensor:
    """`result`, the norm of `x`, which need not be kept."""
    if not result.requires_grad or torch.compiler.is_compiling():
        return result
    # copies, which are small: a weight that is gathered now need not be when this is computed again
    kept, version = [weight.detach().clone() for weight in weights], x._version

    def again() -> Tensor:
        if x._version != version:
            raise UsageError(
                f"the input of a normalisation, of shape {tuple(x.shape)}, was changed in place after its use, and the "
                'backward needs it. Do not change it, or set "fused_kernels": {"norm": false}.'
            )
        with torch.no_grad():
            return norm(x, *kept)[0]

    return recomputable(result, again)


def find_residual(module: nn.Module, norms: Mapping[nn.Module, Swap]) -> Swap | Refused | None:
    """How the sum before one of these norms, which run on kernels, is computed; None for modules without one."""
    names = {name for name, child in module.named_children() if child in norms}
    forward = innermost(type(module)) if names else None
    if not isinstance(forward, types.FunctionType):
        return None
    tree = tree_of(forward)
    found = {} if tree is None else _rewritten(tree, names)
    if tree is None or not found:
        return None
    if reason := overridden(module):
        return Refused(reason)
    if forward.__closure__ or not is_read_from(forward, tree_of(forward)):
        return Refused(f"the forward of {type(module).__name__} uses names of its class or around it")
    again = exchanged(type(module).forward, forward, _function(tree, forward))
    if again is None:
        return Refused(f"decorators of {type(module).__name__}.forward hide what they call")
    put = partial(_put_layer, module, _Layer(again, tuple(found)).run)
    name, adds = max(found.items(), key=lambda each: each[1])
    norm = norms[module.get_submodule(name)]
    scene = None if norm.scene is None else partial(norm.scene, summed=True)
    return Swap(f"{'sum' if adds else 'sum of gradients'} in {norm.kernel}", put, scene)


def _put_layer(module: nn.Module, run: Callable[..., Any]) -> Undo:
    undone = [put_forward(module, run), put_attribute(module, _SUM, residual_sum)]

    def undo() -> None:
        for each in undone:
            each()

    return undo


class _Layer:
    """A layer whose forward was written again."""

    def __init__(self, forward: Callable[..., Any], norms: tuple[str, ...]) -> None:
        self.forward, self.norms = forward, norms

    def run(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Hooks of others on a norm would see a norm that also adds; for them it stays what it was.

        So it does where a norm was exchanged or wrapped meanwhile, by one that only normalises.
        """
        ours = not watched_everywhere() and all(_adds(module._modules.get(norm)) for norm in self.norms)
        return (self.forward if ours else type(module).forward)(module, *args, **kwargs)


def _adds(norm: nn.Module | None) -> bool:
    return norm is not None and replacement(norm) is not None and only_ours(norm)


def _rewritten(tree: ast.Module, names: Collection[str]) -> dict[str, bool]:
    """Write sums around these norms again, in place; by the name of the norm, whether it adds before it normalises."""
    found: dict[str, bool] = {}
    changed = {name for node in ast.walk(tree) if (name := changed_in_place(node)) is not None}
    for node in ast.walk(tree):
        inside = getattr(node, "body", None)
        body: list[ast.stmt] = inside if isinstance(inside, list) else []
        for at in range(len(body) - 1):
            for length, fits, call in ((3, _is_sum, _sum), (2, _is_kept, _keep)):
                lines = body[at : at + length]
                norm = _norm(lines[-1]) if len(lines) == length else None
                if norm is not None and norm[0] in names and fits(*lines) and assigned(lines[-2]) not in changed:
                    body[at : at + length] = [call(*lines)]
                    found[norm[0]] = found.get(norm[0], False) or length == 3
                    break
    if found:
        _rewrite_last(tree)
    ast.fix_missing_locations(tree)
    return found


def _rewrite_last(tree: ast.Module) -> None:
    """Let the sum that a layer returns, `return residual + x` or a line before, be one of `residual_sum`, in place."""
    code = next(node for node in tree.body if isinstance(node, ast.FunctionDef))
    last = code.body[-1]
    for line in code.body[-2:]:
        added = line.value if isinstance(line, (ast.Assign, ast.Return)) else None
        kept = line is last or _returns(last, assigned(line))
        if kept and isinstance(added, ast.BinOp) and isinstance(added.op, ast.Add) and isinstance(added.left, ast.Name):
            called = ast.Attribute(ast.Name(code.args.args[0].arg, ast.Load()), _SUM, ast.Load())
            line.value = ast.copy_location(ast.Call(called, [added.left, added.right], []), added)  # type: ignore[attr-defined]


def _returns(line: ast.stmt, name: str | None) -> bool:
    value = line.value if isinstance(line, ast.Return) else None
    return isinstance(value, ast.Name) and value.id == name


def _norm(node: ast.AST) -> tuple[str, str] | None:
    """(name of a module, argument) of `x = self.module(argument)`."""
    call = node.value if isinstance(node, ast.Assign) else None
    if not isinstance(call, ast.Call) or call.keywords or len(call.args) != 1 or not isinstance(call.args[0], ast.Name):
        return None
    name = called_on_self(call)
    return None if name is None else (name, call.args[0].id)


def _is_sum(first: ast.AST, second: ast.AST, third: ast.AST) -> bool:
    """Whether the sum of the first line is kept by the second, and normalised and forgotten by the third."""
    total = assigned(first)
    added = isinstance(first, ast.Assign) and isinstance(first.value, ast.BinOp) and isinstance(first.value.op, ast.Add)
    if total is None or not added:
        return False
    parts = (first.value.left, first.value.right)  # type: ignore[attr-defined]
    named = any(isinstance(part, ast.Name) for part in parts)
    # the call computes its parts in another order, which nobody sees unless one assigns what the other reads
    assigns = any(isinstance(node, ast.NamedExpr) for part in parts for node in ast.walk(part))
    return named and not assigns and _is_kept(second, third) and assigned(third) == total


def _is_kept(first: ast.AST, second: ast.AST) -> bool:
    """Whether what the first line keeps is normalised and forgotten by the second."""
    kept, norm = assigned(first), _norm(second)
    named = isinstance(first, ast.Assign) and isinstance(first.value, ast.Name)
    if kept is None or norm is None or not named:
        return False
    source: str = first.value.id  # type: ignore[attr-defined]
    return kept != source and source == norm[1] == assigned(second)


def _sum(first: Any, second: Any, third: Any) -> ast.Assign:
    left, right = first.value.left, first.value.right
    residual, other = (left, right) if isinstance(left, ast.Name) else (right, left)
    return _call(second, third, other, ast.keyword("residual", residual))


def _keep(first: Any, second: Any) -> ast.Assign:
    return _call(first, second, second.value.args[0], ast.keyword("keeps", ast.Constant(True)))


def _call(kept: Any, norm: Any, argument: ast.expr, keyword: ast.keyword) -> ast.Assign:
    """normalised, kept = norm(argument, keyword)."""
    targets = ast.Tuple([norm.targets[0], kept.targets[0]], ast.Store())
    return ast.copy_location(ast.Assign([targets], ast.Call(norm.value.func, [argument], [keyword])), kept)


def _function(tree: ast.Module, forward: types.FunctionType) -> Callable[..., Any]:
    """The function of a tree, with the names and defaults of the one that it was read from."""
    code = next(node for node in tree.body if isinstance(node, ast.FunctionDef))
    code.decorator_list = []
    ast.increment_lineno(tree, forward.__code__.co_firstlineno - 1)  # an error shows the line of the class's own
    made: Callable[..., Any] = copied(forward, code=code_of(tree, forward))
    return made
