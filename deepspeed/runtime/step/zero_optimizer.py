"""`ZeroOptimizer`: what the engine returns as the optimizer at ZeRO's stages, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from deepspeed.errors import UsageError
from deepspeed.runtime.base_optimizer import MixedPrecisionOptimizer

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from deepspeed.parallel import AxisGroup
    from deepspeed.precision.scale import LossScale
    from deepspeed.runtime.step.stepper import Stepper
    from deepspeed.zero.public.rehook import ParameterOffload

__all__ = ["ZeroOptimizer"]


class ZeroOptimizer(MixedPrecisionOptimizer):
    """An optimizer whose states are spread over ranks.

    Its groups list this rank's parts of the master weights. Attributes of DeepSpeed's own optimizers that scripts read
    (`single_partition_of_fp32_groups` and others) are computed when asked for: `deepspeed.zero.public.views`.
    """

    parameter_offload: ParameterOffload
    """At stage 3 only: the hooks that gather parameters, for clients that take them off and put them on again."""

    def __init__(
        self,
        optimizer: Optimizer,
        stepper: Stepper,
        scale: LossScale,
        *,
        backward: Callable[..., Any],
        clip_grad: float,
        axis: AxisGroup,
        extend: Callable[[list[nn.Parameter]], None],
    ) -> None:
        super().__init__(optimizer, stepper, scale, backward=backward, clip_grad=clip_grad, extend=extend)
        self._axis = axis

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
