"""Master weights: the optimizer updates wide copies, the model keeps its narrow parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from deepspeed.parallel import AxisGroup
from deepspeed.runtime.step.norm import total_norm

__all__ = ["Masters", "WholeState"]


class WholeState:
    """`deepspeed.zero.states.lookup.ParameterState` for a parameter that is whole on this rank."""

    axis: AxisGroup | None = None

    def __init__(self, param: nn.Parameter, master: nn.Parameter) -> None:
        self._param = param
        self.master: nn.Parameter | None = master
        self.name = f"the parameter of shape {tuple(param.shape)}"
        self.shape = param.shape
        self.interval = 0, param.numel()
        self.chunk = param.numel()
        self.dtype = master.dtype
        self.device = param.device

    def gradient(self) -> torch.Tensor | None:
        """See `ParameterState`; where gradients are accumulated in the master's dtype they lie there already."""
        assert self.master is not None, "whole masters are never absent"
        grad = self._param.grad if self._param.grad is not None else self.master.grad
        return grad.to_dense() if grad is not None and grad.layout != torch.strided else grad

    def has_gradient(self) -> bool:
        """See `ParameterState`."""
        return self.gradient() is not None

    def put_gradient(self, values: torch.Tensor) -> None:
        """See `ParameterState`."""
        holder = self._param if self._param.grad is not None else self.master
        assert holder is not None, "whole masters are never absent"
        holder.grad = values.to(holder.dtype).view(self.shape)

    def update(self, optimizer: Optimizer) -> None:
        """Let the optimizer take its step."""
        optimizer.step()

    @torch.no_grad()
    def publish(self) -> None:
        """See `ParameterState`."""
        if self.master is not None and self.master is not self._param:
            self._param.data.copy_(self.master)  # not seen by the version that tells of edits


class Masters:
    """For every parameter of an optimizer the tensor that the optimizer updates.

    Where the dtypes agree that is the parameter itself and nothing is copied. Otherwise the optimizer's groups (the
    same dicts, so that schedules keep their hold) list master weights instead. A frozen parameter gets its master
    when it is unfrozen.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        dtype: torch.dtype,
        *,
        model_group: Any = None,
        is_split: Callable[[nn.Parameter], bool] = lambda _: False,
        wide_norm: bool = False,
    ) -> None:
        """`is_split` tells the parameters of which each rank of `model_group` holds a different part.

        `wide_norm` sums squares in float64, so that the norm equals that of the same gradients in shards.
        """
        self._optimizer = optimizer
        self._dtype = dtype
        self._model_group = model_group
        self._is_split = is_split
        self._wide_norm = wide_norm
        self._of: dict[int, nn.Parameter] = {}
        self._param_of: dict[int, nn.Parameter] = {}
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._versions: list[int] = []
        self._waiting: list[tuple[dict[str, object], nn.Parameter]] = []
        for group in optimizer.param_groups:
            self.add(group)

    @property
    def copies(self) -> bool:
        """True if some parameter has a master that is not itself."""
        return bool(self._pairs or self._waiting)

    def of(self, param: nn.Parameter) -> nn.Parameter:
        """The tensor that the optimizer updates for `param`; itself where there is no other."""
        return self._of.get(id(param), param)

    def refresh(self) -> list[nn.Parameter]:
        """Give masters to parameters that were unfrozen; returns those parameters."""
        if not self._waiting:
            return []
        awake = [(group, param) for group, param in self._waiting if param.requires_grad]
        if awake:
            self._waiting = [item for item in self._waiting if not item[1].requires_grad]
            for group, param in awake:
                self._enter(group, param)
        return [param for _, param in awake]

    def add(self, options: dict[str, Any]) -> None:
        """Take over a group of the optimizer."""
        params, options["params"] = options["params"], []
        for param in params:
            self._enter(options, param)

    def listed(self) -> list[list[tuple[nn.Parameter, nn.Parameter]]]:
        """Per group of the optimizer the parameters with their masters."""
        groups = self._optimizer.param_groups
        return [[(self._param_of.get(id(m), m), m) for m in group["params"]] for group in groups]

    def held(self, param: nn.Parameter) -> WholeState | None:
        """What the optimizer holds of a parameter; None if it does not train it."""
        master = self._of.get(id(param))
        return None if master is None else WholeState(param, master)

    @torch.no_grad()
    def adopt_edits(self) -> None:
        """Take over parameters that somebody wrote since the last step (a loaded state dict, an edit).

        Otherwise the next update would silently undo that.
        """
        for place, (param, master) in enumerate(self._pairs):
            if param._version != self._versions[place]:
                master.copy_(param)
                self._versions[place] = param._version

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Move gradients from the parameters to their masters, in the masters' dtype."""
        self.adopt_edits()
        for param, master in self._pairs:
            if param.grad is not None:
                master.grad = param.grad.to(master.dtype)
                param.grad = None

    def update(self, optimizer: Optimizer) -> None:
        """Let the optimizer take its step."""
        optimizer.step()

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the updated masters into the parameters."""
        if self._pairs:
            torch._foreach_copy_([param for param, _ in self._pairs], [master for _, master in self._pairs])
            self._versions = [param._version for param, _ in self._pairs]

    def gradients(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """The gradients that the optimizer is about to use, each with the model's parameter."""
        for group in self._optimizer.param_groups:
            for updated in group["params"]:
                if updated.grad is not None:
                    yield self._param_of.get(id(updated), updated), updated.grad

    def measure(self) -> torch.Tensor:
        """The norm of all gradients of the whole model."""
        gradients = list(self.gradients())
        if self._model_group is None:
            return total_norm([grad for _, grad in gradients], [], wide=self._wide_norm)
        split = [grad for param, grad in gradients if self._is_split(param)]
        shared = [grad for param, grad in gradients if not self._is_split(param)]
        return total_norm(shared, split, self._model_group, wide=self._wide_norm)

    def zero_grad(self) -> None:
        """Drop every gradient, of masters and of the model's parameters."""
        self._optimizer.zero_grad(set_to_none=True)
        for param, _ in self._pairs:
            param.grad = None

    def _enter(self, group: dict[str, object], param: nn.Parameter) -> None:
        listed = group["params"]
        assert isinstance(listed, list), "torch keeps a group's parameters in a list"
        if param.dtype == self._dtype or not param.is_floating_point():
            self._of[id(param)] = param
            listed.append(param)
            return
        if not param.requires_grad:
            self._waiting.append((group, param))
            return
        master = nn.Parameter(param.detach().to(self._dtype), requires_grad=True)
        if param in self._optimizer.state:
            self._optimizer.state[master] = self._optimizer.state.pop(param)
        self._of[id(param)] = master
        self._param_of[id(master)] = param
        self._pairs.append((param, master))
        self._versions.append(param._version)
        listed.append(master)
