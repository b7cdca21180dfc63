"""Read and write master weights, gradients and optimizer states by parameter, wherever they lie.

All ranks call these functions together, in the same order. A parameter that no engine trains has none of this: reading
gives None, writing is an error. Gradients are there between backward and step, as the optimizer is about to see them:
averaged over ranks, without the loss scale, before clipping. Functions with `local` in their names read and write this
rank's chunk at ZeRO stage 3, padded with zeros; the others the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.ops.moments import MomentKeeper, scale_name
from deepspeed.zero.states.parameter_state import ParameterState, StateOwner, join, owner_of, plain_state


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """A copy of the whole master weight."""
    return _get_master(param, "safe_get_full_fp32_param")


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """A copy of this rank's chunk of the master weight."""
    return _get_master(param, "safe_get_local_fp32_param")


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace the master weight, and with it the model's parameter."""
    _set_master(param, value, "safe_set_full_fp32_param")


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's chunk of the master weight, and of the model's parameter."""
    _set_master(param, value, "safe_set_local_fp32_param")


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """A copy of the whole gradient; None also if no rank had one."""
    return _get_grad(param, "safe_get_full_grad")


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """A copy of this rank's chunk of the gradient."""
    return _get_grad(param, "safe_get_local_grad")


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace the gradient that the next step uses."""
    _set_grad(param, value, "safe_set_full_grad")


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's chunk of the gradient that the next step uses."""
    _set_grad(param, value, "safe_set_local_grad")


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace each gradient by `update_func(whole gradient, param)`; parameters without a gradient are left alone."""
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Any:
    """A copy of the whole state, such as "exp_avg", or the number, such as "step"; None before the first step."""
    return _get_state(param, optim_state_key, "safe_get_full_optimizer_state")


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Any:
    """A copy of this rank's chunk of a state; a number as it is; None before the first step."""
    return _get_state(param, optim_state_key, "safe_get_local_optimizer_state")


def safe_set_full_optimizer_state(param: nn.Parameter, value: Any, optim_state_key: str) -> None:
    """Replace a state that exists."""
    _set_state(param, value, optim_state_key, "safe_set_full_optimizer_state")


def safe_set_local_optimizer_state(param: nn.Parameter, value: Any, optim_state_key: str) -> None:
    """Replace this rank's chunk of a state that exists."""
    _set_state(param, value, optim_state_key, "safe_set_local_optimizer_state")


# ---- what the functions with and without `local` share; `call` is the name of the function


def _get_master(param: nn.Parameter, call: str) -> Tensor | None:
    owner, held = _find(param, call)
    if owner is None or held is None:
        return None
    owner.adopt()
    return _read(held, held.master, held.dtype, call)


@torch.no_grad()
def _set_master(param: nn.Parameter, value: Tensor, call: str) -> None:
    owner, held = _need(param, call)
    owner.adopt()
    _write(held.master, _mine(held, value, call))
    held.publish()


def _get_grad(param: nn.Parameter, call: str) -> Tensor | None:
    owner, held = _find(param, call)
    if owner is None or held is None:
        return None
    unit = _unit(owner, held)
    grad = _read(held, held.gradient(), held.dtype, call, present=held.has_gradient())
    return grad if grad is None or unit == 1.0 else grad.mul_(unit)


@torch.no_grad()
def _set_grad(param: nn.Parameter, value: Tensor, call: str) -> None:
    owner, held = _need(param, call)
    unit = _unit(owner, held)
    held.put_gradient(_mine(held, value, call).to(held.dtype) / unit)


def _get_state(param: nn.Parameter, key: str, call: str) -> Any:
    owner, held = _find(param, call)
    if owner is None or held is None:
        return None
    mine = plain_state(owner.optimizer, held.master)
    kind = _kind(held, mine, key)
    if kind is None:
        return None
    return _read(held, mine.get(key), kind, call) if isinstance(kind, torch.dtype) else kind[0]


@torch.no_grad()
def _set_state(param: nn.Parameter, value: Any, key: str, call: str) -> None:
    owner, held = _need(param, call)
    kind = _kind(held, plain_state(owner.optimizer, held.master), key)
    if kind is None:
        raise UsageError(f"the optimizer has no state of {held.name} yet; take a step, or load a checkpoint, first")
    optimizer, master = owner.optimizer, held.master
    part = _mine(held, value, call) if isinstance(kind, torch.dtype) else None
    if master is None:
        return
    known = optimizer.state[master]
    if part is None:
        _set_number(known, key, value)
    elif isinstance(optimizer, MomentKeeper) and scale_name(key) in known:
        optimizer.set_moment(master, key, part)
    else:
        _write(known.get(key), part)


# ---- which parameter


def _find(param: nn.Parameter, call: str) -> tuple[StateOwner | None, ParameterState | None]:
    owner = owner_of(param)
    if owner is not None and "_local_" in call and not owner.sharded:
        raise UsageError(
            f"{call} reads a rank's chunk of a parameter, which exists at ZeRO stage 3 only; use "
            f"{call.replace('_local_', '_full_')} at the other stages"
        )
    return owner, owner.find(param) if owner is not None and param.requires_grad else None


def _need(param: nn.Parameter, call: str) -> tuple[StateOwner, ParameterState]:
    owner, held = _find(param, call)
    if owner is None or held is None:
        raise UsageError(
            f"{call}: no engine trains this parameter of shape {tuple(getattr(param, 'ds_shape', param.shape))}. It is "
            "frozen, not in the optimizer, or its engine was destroyed."
        )
    return owner, held


def _unit(owner: StateOwner, held: ParameterState) -> float:
    unit = owner.unit()
    if unit is None:
        raise UsageError(f"there is no gradient of {held.name}: gradients are available between backward and step only")
    return unit


# ---- parts of tensors


def _read(
    held: ParameterState, part: Tensor | None, dtype: torch.dtype, call: str, *, present: bool = True
) -> Tensor | None:
    """A copy of the whole tensor, of which this rank has a `part`, or of its padded chunk."""
    if "_local_" not in call:
        return join(held, part, dtype, present)
    chunk = torch.zeros(held.chunk, dtype=dtype, device=held.device)
    if part is not None:
        chunk[: part.numel()].copy_(part.detach().reshape(-1))
    return chunk


def _mine(held: ParameterState, value: Tensor, call: str) -> Tensor:
    """What lies here of a given whole tensor, or a given chunk without its padding."""
    found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    start, stop = held.interval
    if "_local_" in call:
        if not isinstance(value, Tensor) or value.numel() not in (stop - start, held.chunk):
            raise UsageError(
                f"this rank's chunk of {held.name} has {stop - start} elements, {held.chunk} with padding; the given "
                f"value: {found}"
            )
        start, stop = 0, stop - start
    elif not isinstance(value, Tensor) or value.shape != held.shape:
        raise UsageError(f"{held.name} has the shape {tuple(held.shape)}; the given value: {found}")
    return value.detach().reshape(-1)[start:stop].to(held.device)


def _write(target: Tensor | None, part: Tensor) -> None:
    if target is not None:
        target.detach().copy_(part.view(target.shape))


# ---- optimizer states


def _kind(held: ParameterState, mine: dict[str, Any], key: str) -> torch.dtype | tuple[Any] | None:
    """The dtype of a state that has the elements of its parameter, the value of one that has not, None without state.

    Ranks on which no element lies learn it from the others.
    """
    own: tuple[list[str], Any] | None = None
    if held.master is not None:
        value = mine.get(key)
        if isinstance(value, Tensor) and value.shape == held.master.shape:
            own = sorted(mine), value.dtype
        else:
            own = sorted(mine), (value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value,)
    everyone = [own]
    if held.axis is not None:
        everyone *= held.axis.size
        comm.all_gather_object(everyone, own, group=held.axis.group)
    keys, kind = next(each for each in everyone if each is not None)
    if not keys:
        return None
    if key not in keys:
        raise UsageError(f"the optimizer keeps no state {key!r} for {held.name}; it keeps {keys}")
    found: torch.dtype | tuple[Any] = kind
    return found


def _set_number(mine: dict[str, Any], key: str, value: Any) -> None:
    old = mine[key]
    if isinstance(old, Tensor):
        old.copy_(torch.as_tensor(value, dtype=old.dtype))
    else:
        mine[key] = value
