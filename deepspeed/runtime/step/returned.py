"""The optimizer that `deepspeed.initialize` returns, and what happens when it is given more parameters."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from deepspeed.runtime.base_optimizer import MixedPrecisionOptimizer
from deepspeed.runtime.parts import Parts
from deepspeed.runtime.placing import spread
from deepspeed.runtime.reduction.build import extend_reducer
from deepspeed.runtime.reduction.reducer import GradientReducer
from deepspeed.runtime.step.modes import Modes
from deepspeed.runtime.step.stepper import Stepper
from deepspeed.runtime.step.zero_optimizer import ZeroOptimizer
from deepspeed.zero.public.rehook import ParameterOffload
from deepspeed.zero.states.lookup import Owner, attach

__all__ = ["returned_optimizer"]


def returned_optimizer(
    parts: Parts, basic: Optimizer, stepper: Stepper, owner: Owner, stack: ExitStack
) -> Optimizer | MixedPrecisionOptimizer:
    """The torch optimizer itself where it updates the model's own parameters with unscaled gradients."""
    zero = parts.config.schema.zero_optimization
    plain = not zero.stage and not stepper.states.copies
    if plain and parts.scale.value == 1.0 and not parts.scale.dynamic:
        return basic
    stack.callback(Modes(basic, stepper.states).close)
    axis = parts.layout["dp", "sp"]
    common: dict[str, Any] = {
        "backward": parts.backward.run,
        "clip_grad": parts.config.schema.gradient_clipping,
        "extend": partial(_extend, parts, owner),
    }
    if not zero.stage:
        return MixedPrecisionOptimizer(basic, stepper, parts.scale, **common)
    made = ZeroOptimizer(basic, stepper, parts.scale, **common, axis=axis)
    if zero.stage == 3:
        hooks = parts.sharded.hooks if parts.sharded is not None else None
        made.parameter_offload = ParameterOffload(parts.module, hooks)
        stack.callback(made.parameter_offload.close)
    return made


def _extend(parts: Parts, owner: Owner, params: list[nn.Parameter]) -> None:
    """Prepare parameters that `add_param_group` brings: equal on all ranks, sharded, hooked, reduced."""
    names = {id(param): name for name, param in parts.module.named_parameters()}
    named = [(names.get(id(param), f"added parameter of shape {tuple(param.shape)}"), param) for param in params]
    spread(named, parts.lies_on)
    attach(params, owner)
    if parts.sharded is not None:
        parts.sharded.extend(named)
    elif isinstance(parts.reducer, GradientReducer) and parts.states is not None:
        extend_reducer(parts.reducer, named, parts.module, parts.precision, parts.states)
