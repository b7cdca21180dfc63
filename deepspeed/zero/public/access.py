"""Read and write master weights, gradients and optimizer states by parameter, wherever they lie.

All ranks call these functions together, in the same order. A parameter that no engine trains has none of this: reading
gives None, writing is an error. Gradients are there between backward and step, as the optimizer is about to see them:
averaged over ranks, without the loss scale, before clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.ops.moments import MomentKeeper, scale_name
from deepspeed.zero.states.parameter_state import ParameterState, StateOwner, join, owner_of

# ---- whole


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """A copy of the whole master weight."""
    owner, held = _find(param)
    if owner is None or held is None:
        return None
    owner.adopt()
    return join(held, held.master, held.dtype, True)


@torch.no_grad()
def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace the master weight, and with it the model's parameter."""
    owner, held = _need(param, "safe_set_full_fp32_param")
    owner.adopt()
    _write(held, held.master, _part(held, value))
    held.publish()


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """A copy of the whole gradient; None also if no rank had one."""
    owner, held = _find(param)
    if owner is None or held is None:
        return None
    unit = _unit(owner, held)
    whole = join(held, held.gradient(), held.dtype, held.has_gradient())
    return whole if whole is None or unit == 1.0 else whole.mul_(unit)


@torch.no_grad()
def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace the gradient that the next step uses."""
    owner, held = _need(param, "safe_set_full_grad")
    unit = _unit(owner, held)
    held.put_gradient(_part(held, value).to(held.dtype) / unit)


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
    owner, held = _find(param)
    if owner is None or held is None:
        return None
    mine = _states(owner, held)
    kind = _kind(held, mine, optim_state_key)
    if kind is None:
        return None
    if not isinstance(kind, torch.dtype):
        return kind[0]
    return join(held, mine.get(optim_state_key), kind, True)


@torch.no_grad()
def safe_set_full_optimizer_state(param: nn.Parameter, value: Any, optim_state_key: str) -> None:
    """Replace a state that exists."""
    owner, held = _need(param, "safe_set_full_optimizer_state")
    mine = _states(owner, held)
    kind = _existing(held, mine, optim_state_key)
    if isinstance(kind, torch.dtype):
        _put_state(owner, held, optim_state_key, _part(held, value))
    elif held.master is not None:
        _set_number(owner.optimizer.state[held.master], optim_state_key, value)


# ---- this rank's chunk


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """A copy of this rank's chunk of the master weight, padded with zeros."""
    owner, held = _find_local(param, "safe_get_local_fp32_param")
    if owner is None or held is None:
        return None
    owner.adopt()
    return _chunk(held, held.master, held.dtype)


@torch.no_grad()
def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's chunk of the master weight, and of the model's parameter."""
    owner, held = _need(param, "safe_set_local_fp32_param", local=True)
    owner.adopt()
    _write(held, held.master, _cut(held, value))
    held.publish()


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """A copy of this rank's chunk of the gradient, padded with zeros."""
    owner, held = _find_local(param, "safe_get_local_grad")
    if owner is None or held is None:
        return None
    unit = _unit(owner, held)
    return _chunk(held, held.gradient(), held.dtype).mul_(unit)


@torch.no_grad()
def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's chunk of the gradient that the next step uses."""
    owner, held = _need(param, "safe_set_local_grad", local=True)
    unit = _unit(owner, held)
    held.put_gradient(_cut(held, value).to(held.dtype) / unit)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Any:
    """A copy of this rank's chunk of a state, padded with zeros; a number as it is; None before the first step."""
    owner, held = _find_local(param, "safe_get_local_optimizer_state")
    if owner is None or held is None:
        return None
    mine = _states(owner, held)
    kind = _kind(held, mine, optim_state_key)
    if kind is None:
        return None
    return _chunk(held, mine.get(optim_state_key), kind) if isinstance(kind, torch.dtype) else kind[0]


@torch.no_grad()
def safe_set_local_optimizer_state(param: nn.Parameter, value: Any, optim_state_key: str) -> None:
    """Replace this rank's chunk of a state that exists."""
    owner, held = _need(param, "safe_set_local_optimizer_state", local=True)
    mine = _states(owner, held)
    kind = _existing(held, mine, optim_state_key)
    if isinstance(kind, torch.dtype):
        _put_state(owner, held, optim_state_key, _cut(held, value))
    elif held.master is not None:
        _set_number(owner.optimizer.state[held.master], optim_state_key, value)


# ---- which parameter


def _find(param: nn.Parameter) -> tuple[StateOwner | None, ParameterState | None]:
    owner = owner_of(param)
    return owner, owner.find(param) if owner is not None and param.requires_grad else None


def _find_local(param: nn.Parameter, call: str) -> tuple[StateOwner | None, ParameterState | None]:
    owner, held = _find(param)
    if owner is not None and not owner.sharded:
        raise UsageError(
            f"{call} reads a rank's chunk of a parameter, which exists at ZeRO stage 3 only; use "
            f"{call.replace('_local_', '_full_')} at the other stages"
        )
    return owner, held


def _need(param: nn.Parameter, call: str, *, local: bool = False) -> tuple[StateOwner, ParameterState]:
    owner, held = _find_local(param, call) if local else _find(param)
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


def _part(held: ParameterState, value: Tensor) -> Tensor:
    """What lies here of a whole tensor."""
    if not isinstance(value, Tensor) or value.shape != held.shape:
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise UsageError(f"{held.name} has the shape {tuple(held.shape)}; the given value: {found}")
    return value.detach().reshape(-1)[held.interval[0] : held.interval[1]].to(held.device)


def _cut(held: ParameterState, value: Tensor) -> Tensor:
    """A given chunk without its padding."""
    mine = held.interval[1] - held.interval[0]
    if not isinstance(value, Tensor) or value.numel() not in (mine, held.chunk):
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise UsageError(
            f"this rank's chunk of {held.name} has {mine} elements, {held.chunk} with padding; the given value: {found}"
        )
    return value.detach().reshape(-1)[:mine].to(held.device)


def _chunk(held: ParameterState, part: Tensor | None, dtype: torch.dtype) -> Tensor:
    chunk = torch.zeros(held.chunk, dtype=dtype, device=held.device)
    if part is not None:
        chunk[: part.numel()].copy_(part.detach().reshape(-1))
    return chunk


def _write(held: ParameterState, target: Tensor | None, part: Tensor) -> None:
    if target is not None:
        target.detach().copy_(part.view(target.shape))


# ---- optimizer states


def _states(owner: StateOwner, held: ParameterState) -> dict[str, Any]:
    """The states of what lies here; moments in 8 bits as the values that they stand for."""
    optimizer = owner.optimizer
    found: dict[str, Any] = optimizer.state.get(held.master, {}) if held.master is not None else {}
    if not isinstance(optimizer, MomentKeeper) or not any(scale_name(name) in found for name in found):
        return found
    assert held.master is not None, "what has states lies here"
    codes = {name for name in found if scale_name(name) in found}
    scales = set(map(scale_name, codes))
    return {
        name: optimizer.moment(held.master, name) if name in codes else value
        for name, value in found.items()
        if name not in scales
    }


def _put_state(owner: StateOwner, held: ParameterState, key: str, part: Tensor) -> None:
    """Write a state that has the elements of its parameter."""
    optimizer, master = owner.optimizer, held.master
    if master is None:
        return
    if isinstance(optimizer, MomentKeeper) and scale_name(key) in optimizer.state[master]:
        optimizer.set_moment(master, key, part)
    else:
        _write(held, optimizer.state[master].get(key), part)


def _kind(held: ParameterState, mine: dict[str, Any], key: str) -> torch.dtype | tuple[Any] | None:
    """The dtype of a state that has the elements of its parameter, the value of one that has not, None without state.

    Ranks on which no element lies learn it from the others.
    """
    said: tuple[list[str], Any] | None = None
    if held.master is not None:
        value = mine.get(key)
        if isinstance(value, Tensor) and value.shape == held.master.shape:
            said = sorted(mine), value.dtype
        else:
            said = sorted(mine), (_number(value),)
    heard = [said]
    if held.axis is not None:
        heard *= held.axis.size
        comm.all_gather_object(heard, said, group=held.axis.group)
    keys, kind = next(each for each in heard if each is not None)
    if not keys:
        return None
    if key not in keys:
        raise UsageError(f"the optimizer keeps no state {key!r} for {held.name}; it keeps {keys}")
    found: torch.dtype | tuple[Any] = kind
    return found


def _existing(held: ParameterState, mine: dict[str, Any], key: str) -> torch.dtype | tuple[Any]:
    kind = _kind(held, mine, key)
    if kind is None:
        raise UsageError(f"the optimizer has no state of {held.name} yet; take a step, or load a checkpoint, first")
    return kind


def _number(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _set_number(mine: dict[str, Any], key: str, value: Any) -> None:
    old = mine[key]
    if isinstance(old, Tensor):
        old.copy_(torch.as_tensor(value, dtype=old.dtype))
    else:
        mine[key] = value
