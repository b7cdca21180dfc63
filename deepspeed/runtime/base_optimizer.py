"""What the engine returns as the optimizer where it is more than a torch optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed.errors import UsageError

if TYPE_CHECKING:
    from deepspeed.parallel import AxisGroup
    from deepspeed.precision.scale import LossScale
    from deepspeed.runtime.step.stepper import StepOutcome, Stepper
    from deepspeed.zero.interface import ParameterOffload, RestingWeights


__all__ = ["DeepSpeedOptimizer", "MixedPrecisionOptimizer", "ZeROOptimizer", "reload"]


def reload(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """The optimizer's own `load_state_dict`; its group dicts stay the same objects."""
    before = optimizer.param_groups
    optimizer.load_state_dict(state_dict)
    for old, new in zip(before, optimizer.param_groups, strict=True):
        old.clear()
        old.update(new)
    optimizer.param_groups = before  # torch makes new dicts, but others hold on to these


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
        self._outcome: StepOutcome | None = None

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

    def override_loss_scale(self, loss_scale: float) -> None:
        """Use this loss scale from the next backward on."""
        self._scale.override(loss_scale)

    @property
    def external_loss_scale(self) -> float | None:
        """What `override_loss_scale` set; None if nothing."""
        return self._scale.overridden

    def get_lr(self) -> float:
        """The learning rate of the first group."""
        return float(self.param_groups[0]["lr"])

    def scaled_global_norm(self, norm_type: float = 2) -> float:
        """The norm of the gradients that the next step uses, with the loss scale; all ranks call this together."""
        if norm_type != 2:
            raise UsageError(f"norm_type is {norm_type}; gradients are measured by their 2-norm")
        return float(self._stepper.states.gradient_norm())

    def check_overflow(self, partition_gradients: bool = True) -> bool:
        """Whether some gradient of any rank is inf or NaN, which `overflow` tells from now on; all ranks call this."""
        self.overflow = not math.isfinite(self.scaled_global_norm())
        return self.overflow

    def backward(self, loss: Tensor, retain_graph: bool = False) -> Any:
        """As `engine.backward`."""
        return self._backward(loss, retain_graph=retain_graph)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take one optimizer step, or skip it on overflow; `overflow` tells which."""
        if closure is not None:
            raise TypeError("a closure cannot be used here: backward runs before step, call engine.backward(loss)")
        self.take_step()

    def take_step(self) -> StepOutcome:
        """As `step`, and says what became of it."""
        outcome = self._outcome = self._stepper.step()
        self.overflow = not outcome.applied
        return outcome

    @property
    def _global_grad_norm(self) -> Tensor | float | None:
        """Of the last step, which clients know by this name; waited for if that was not done yet."""
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


class ZeroOptimizer(MixedPrecisionOptimizer):
    """An optimizer whose states are spread over ranks.

    Its groups list this rank's parts of the master weights. Attributes of DeepSpeed's own optimizers that scripts read
    (`single_partition_of_fp32_groups` and others) are computed when asked for: `deepspeed.zero.public.views`.
    """

    resting: RestingWeights | None = None
    """Frozen weights that rest as codes, where the config says so."""
    parameter_offload: ParameterOffload
    """At stage 3 only: the hooks that gather parameters, for clients that take them off and put them on again."""

    def __init__(self, *args: Any, axis: AxisGroup, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._axis = axis

    @property
    def dp_process_group(self) -> Any:
        """The ranks over which states are spread."""
        return self._axis.group

    def quantize_nontrainable_params(self) -> None:
        """Let frozen weights rest as codes from now on, also those that were frozen after `initialize`.

        All ranks call it together, at stage 3 with `zero_optimization.zero_quantized_nontrainable_weights`.
        """
        if self.resting is None:
            raise UsageError(
                "optimizer.quantize_nontrainable_params: this engine was not configured for it; set "
                "zero_optimization.zero_quantized_nontrainable_weights with stage 3"
            )
        self.resting.take(self._stepper.states.held)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            from deepspeed.zero.public import views

            view = views.find(name)
            if view is not None:
                self._stepper.states.settle()
                return view(self._stepper.states, self.optimizer)
        return super().__getattr__(name)

    def state_dict(self) -> dict[str, Any]:
        """As of any engine, of this rank's parts."""
        return {**super().state_dict(), "rank": self._axis.rank, "ranks": self._axis.size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave on the same rank of as many."""
        found = state_dict.get("rank"), state_dict.get("ranks")
        if found != (self._axis.rank, self._axis.size):
            raise UsageError(
                f"this optimizer state is that of rank {found[0]} of {found[1]}, but here is rank {self._axis.rank} of "
                f"{self._axis.size}. Use engine.save_checkpoint and load_checkpoint, which fit any number of ranks."
            )
        super().load_state_dict(state_dict)


ZeROOptimizer = ZeroOptimizer  # DeepSpeed's spelling
