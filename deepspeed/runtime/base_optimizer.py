"""What the engine returns as the optimizer where it is more than a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed._lazy import lazy
from deepspeed.errors import UsageError

if TYPE_CHECKING:
    from deepspeed.precision.scale import LossScale
    from deepspeed.runtime.step.stepper import Outcome, Stepper

__all__ = ["DeepSpeedOptimizer", "MixedPrecisionOptimizer", "reload"]


def reload(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """The optimizer's own `load_state_dict`; its group dicts stay the same objects."""
    before = optimizer.param_groups
    optimizer.load_state_dict(state_dict)
    for old, new in zip(before, optimizer.param_groups, strict=True):
        old.clear()
        old.update(new)
    optimizer.param_groups = before  # torch makes new dicts, but others hold on to these


# An old name in this module for what is made of its classes.
__getattr__ = lazy(__name__, {"ZeROOptimizer": "deepspeed.runtime.step.zero_optimizer:ZeroOptimizer"})


class DeepSpeedOptimizer:
    """Base of every optimizer wrapper of this library."""


# What torch.optim.Optimizer registers in attributes that only its own constructor makes.
_HOOKS = tuple(name for name in dir(Optimizer) if name.startswith("register_"))


def _forwarded(name: str) -> Callable[..., Any]:
    def register(self: MixedPrecisionOptimizer, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.optimizer, name)(*args, **kwargs)

    register.__doc__ = f"`{name}` of the optimizer inside."
    return register


class MixedPrecisionOptimizer(DeepSpeedOptimizer, Optimizer):
    """An optimizer over master weights: `step()` unscales, checks, clips, updates and publishes.

    `param_groups` and `state` are those of the torch optimizer inside, so schedules act on either. It is a torch
    optimizer itself, as torch's schedules demand, but one that holds nothing: its base is never constructed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        stepper: Stepper,
        scale: LossScale,
        *,
        backward: Callable[..., Any],
        clip_grad: float,
        extend: Callable[[list[nn.Parameter]], None],
    ) -> None:
        """`extend` prepares parameters that are new to the engine, on all ranks."""
        self._extend = extend
        self.optimizer = optimizer
        self.overflow = False
        self.clip_grad = clip_grad
        self._stepper = stepper
        self._scale = scale
        self._backward = backward
        self._outcome: Outcome | None = None

    def __getattr__(self, name: str) -> Any:
        # A schedule-free optimizer has two modes; others have no such methods, and then there are none here.
        if name in ("train", "eval"):
            return getattr(self.optimizer, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer inside."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of the optimizer inside, by master weight; what a step left behind is done first."""
        if not self._stepper.states.absent:
            self._stepper.states.settle()
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The default hyperparameters of the optimizer inside."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    @property
    def cur_scale(self) -> float:
        """The loss scale that the next backward uses."""
        return self._scale.value

    loss_scale = cur_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """True if the loss scale adapts to overflows."""
        return self._scale.dynamic

    def needs_scaler(self) -> bool:
        """True if losses are scaled before backward."""
        return self._scale.dynamic or self.cur_scale != 1

    def scale_if_loss(self, value: Any) -> Any:
        """A loss, one number with a gradient function, times the loss scale; anything else as it is."""
        is_loss = isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad
        return value * self.cur_scale if is_loss and self.needs_scaler() else value

    def backward(self, loss: Tensor, retain_graph: bool = False) -> Any:
        """As `engine.backward`."""
        return self._backward(loss, retain_graph=retain_graph)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take one optimizer step, or skip it on overflow; `overflow` tells which."""
        if closure is not None:
            raise TypeError("a closure cannot be used here: backward runs before step, call engine.backward(loss)")
        self.take_step()

    def take_step(self) -> Outcome:
        """As `step`, and says what became of it."""
        outcome = self._outcome = self._stepper.step()
        self.overflow = not outcome.applied
        return outcome

    @property
    def _global_grad_norm(self) -> Tensor | float | None:
        """Of the last step, which clients know by this name; waited for if nobody has yet."""
        return None if self._outcome is None else self._outcome.grad_norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient; `set_to_none=False` has no other meaning here."""
        self._stepper.zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters; every rank starts with the values of the first. All ranks call this together."""
        params = _listed(param_group["params"])
        for param in params:
            held = self._stepper.states.held(param)
            if held is not None:
                raise UsageError(f"add_param_group: {held.name} is trained already; a parameter has one group")
        self._extend(params)
        self.optimizer.add_param_group({**param_group, "params": params})
        self._stepper.states.refresh()
        self._stepper.reducer.refresh()

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer inside, of the loss scale and the master weights.

        What a step left behind is done first.
        """
        self._stepper.states.settle()
        return {
            "optimizer_state_dict": self.optimizer.state_dict(),
            "loss_scaler": self._scale.state_dict(),
            "masters": [[m.detach().to("cpu", copy=True) for m in group["params"]] for group in self.param_groups],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; the model's parameters follow."""
        self._stepper.states.adopt_edits()
        reload(self.optimizer, state_dict["optimizer_state_dict"])
        self._scale.load_state_dict(state_dict["loss_scaler"])
        saved = state_dict.get("masters")
        if saved is None:
            return  # of an older version, which saved none where nothing is sharded
        for group, masters in zip(self.param_groups, saved, strict=True):
            for master, values in zip(group["params"], masters, strict=True):
                master.copy_(values)
        self._stepper.states.publish()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r}, loss scale {self.cur_scale:g})"


for _name in _HOOKS:
    setattr(MixedPrecisionOptimizer, _name, _forwarded(_name))


def _listed(given: Any) -> list[nn.Parameter]:
    if isinstance(given, set):
        raise UsageError("add_param_group: params must have an order that all ranks share; found a set")
    return [given] if isinstance(given, nn.Parameter) else list(given)
