"""What an optimizer keeps per parameter: its moments, in which dtype, and how they come back from a state dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

__all__ = ["Group", "MomentKeeper", "wide"]

Group = dict[str, Any]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a rule computes in: float32, or float64 for a float64 parameter."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class MomentKeeper(torch.optim.Optimizer):
    """An optimizer that names its moments and decides what holds them."""

    moments: ClassVar[tuple[str, ...]] = ()
    """State tensors of a parameter, shaped like it; beside them the state holds the int `step`."""

    settings: ClassVar[tuple[str, ...]] = ()
    """Attributes that a copied or unpickled optimizer keeps; torch keeps only groups and state."""

    fp32_optimizer_states: bool = False

    state_dtype: torch.dtype | None = None
    """What every moment is held in; None leaves it to `fp32_optimizer_states` and the dtype of the parameter."""

    def hold_states(self, dtype: torch.dtype) -> bool:
        """Hold the moments in `dtype`, those too that are there already; False if some are made by somebody else."""
        self.state_dtype = dtype
        for state in self.state.values():
            for name in self.moments:
                if name in state:
                    state[name] = state[name].to(dtype)
        return True

    def _begin(self, group: Group, param: Tensor, state: dict[str, Any], names: Sequence[str]) -> None:
        # Checkpoints of long ago count steps per group.
        state["step"] = int(group.get("step", 0))
        for name in names:
            state[name] = torch.zeros_like(param, dtype=self._state_dtype(param), requires_grad=False)

    def _state_dtype(self, param: Tensor) -> torch.dtype:
        if self.state_dtype is not None:
            return self.state_dtype
        return wide(param.dtype) if self.fp32_optimizer_states else param.dtype

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over groups and state; unlike in torch, moments keep the precision of this optimizer's states."""
        super().load_state_dict(dict(state_dict))
        indices = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, param in zip(indices, params, strict=True):
            state = self.state.get(param, {})
            for name, value in state_dict["state"].get(index, {}).items():
                state[name] = self._restored(param, name, value)

    def _restored(self, param: Tensor, name: str, value: Any) -> Any:
        """A value of a saved state, as this optimizer keeps it."""
        if name == "step":
            return int(value)  # torch's own optimizers save a tensor
        if name in self.moments and isinstance(value, Tensor):
            return value.to(device=param.device, dtype=self._state_dtype(param))
        return value

    def __getstate__(self) -> dict[str, Any]:
        kept: dict[str, Any] = super().__getstate__()
        return {**kept, **{name: getattr(self, name) for name in ("state_dtype", *self.settings)}}
