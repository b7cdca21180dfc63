"""RMS and layer normalisations."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.errors import UsageError
from deepspeed.fusion.again import computable
from deepspeed.fusion.likeness import overridden, same, stand_in
from deepspeed.fusion.swap import TOKENS, Refused, Swap, put_forward, whole_shape
from deepspeed.ops.model.norm import layer_norm, rms_norm, rms_norm_reference
from deepspeed.ops.rehearsal import forth_and_back

__all__ = ["find_norm"]

Norm = Callable[..., tuple[Tensor, Tensor]]

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

        forth_and_back(behind, (TOKENS, width), (TOKENS, width), *weights, dtype=dtype)
    else:
        forth_and_back(lambda *inputs: norm(*inputs)[0], (TOKENS, width), *weights, dtype=dtype)


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

    return computable(result, again)
