"""`Counter`: operations as torch dispatches them, each added to the module that is running.

Products of matrices, convolutions and attention by torch's own formulas, at two operations per multiplication with an
addition; a normalisation by its passes over the elements; everything that computes element by element as one operation
per element; copies, views and look-ups as nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from deepspeed.events import AHEAD

__all__ = ["Counter", "Work", "wrapFunc"]

Work = tuple[float, float]
"""(operations, multiplications with an addition among them)"""

aten = torch.ops.aten

# Passes over the input of what is no single operation per element.
_PASSES: dict[Any, Callable[[tuple[Any, ...]], int]] = {
    aten.native_layer_norm: lambda args: 4 if args[2] is None else 5,
    aten.native_group_norm: lambda args: 4 if args[1] is None else 5,
    aten.native_batch_norm: lambda args: 4 if args[1] is None else 5,
    aten._fused_rms_norm: lambda args: 3 if args[2] is None else 4,
}

_REDUCTIONS = """
    sum mean amax amin max min prod var var_mean std norm linalg_vector_norm logsumexp cumsum cumprod
    nll_loss_forward nll_loss2d_forward avg_pool2d _adaptive_avg_pool2d max_pool2d_with_indices
"""
_ELEMENTWISE = """
    add sub rsub mul div pow sqrt rsqrt exp exp2 expm1 log log1p log2 sin cos tan tanh sigmoid erf erfc neg abs sign
    reciprocal square relu threshold leaky_relu elu gelu silu mish hardtanh hardswish hardsigmoid softplus glu
    log_sigmoid_forward _softmax _log_softmax addcmul addcdiv lerp where maximum minimum clamp clamp_min clamp_max
    mse_loss smooth_l1_loss huber_loss binary_cross_entropy native_dropout bernoulli floor ceil round remainder fmod
    upsample_nearest1d upsample_nearest2d upsample_bilinear2d
    add_ sub_ mul_ div_ pow_ sqrt_ exp_ tanh_ sigmoid_ relu_ clamp_ addcmul_ addcdiv_ lerp_
"""


def _packets(names: str) -> frozenset[Any]:
    return frozenset(getattr(aten, name) for name in names.split() if hasattr(aten, name))


# What computes once for each element of its input, and of its output.
_BY_INPUT, _BY_OUTPUT = _packets(_REDUCTIONS), _packets(_ELEMENTWISE)

# Attention that torch's own table does not know.
_ATTENTION = _packets("_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable")


_ENTER, _EXIT = torch.ops.profiler._record_function_enter_new, torch.ops.profiler._record_function_exit


class Counter(TorchDispatchMode):
    """While it is entered, hands the work of every operation to `add`."""

    def __init__(self, add: Callable[[Work], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.add = add
        self._ranges: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket is _ENTER:
            self._ranges.append(args[0])
        elif func._overloadpacket is _EXIT and self._ranges:
            self._ranges.pop()
        if AHEAD in self._ranges:  # work of the backward, which whoever asks for that of the forward does not mean
            return out
        work = work_of(func._overloadpacket, args, kwargs or {}, out)
        if work[0]:
            self.add(work)
        return out


def work_of(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Work:
    """What one operation costs."""
    formula = flop_registry.get(packet)
    if formula is not None:
        flops = float(formula(*args, **kwargs, out_val=out))
        return flops, flops / 2
    passes = _PASSES.get(packet)
    if passes is not None:
        return passes(args) * float(_elements(args[:1])), 0.0
    if packet in _ATTENTION:
        *batch, length, width = args[0].shape
        macs = float(math.prod(batch)) * length * args[1].shape[-2] * (width + args[2].shape[-1])
        return 2 * macs, macs
    if packet in _BY_INPUT:
        return float(_elements(args[:1])), 0.0
    if packet in _BY_OUTPUT:
        return float(_elements(out)), 0.0
    return 0.0, 0.0


def _elements(values: Any) -> int:
    """Of the first tensor that is of floating point."""
    found = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return next((leaf.numel() for leaf in found), 0)


def wrapFunc(func: Callable[..., Any], funcFlopCompute: Callable[..., Work]) -> Callable[..., Any]:
    """`func`, which tells a profile that is running what it costs: funcFlopCompute(*args, **kwargs) → (flops, MACs).

    For kernels of one's own, whose operations torch does not see.
    """

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        counters = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Counter)]
        if not counters:
            return func(*args, **kwargs)
        counters[-1].add(funcFlopCompute(*args, **kwargs))
        return func(*args, **kwargs)

    return call
