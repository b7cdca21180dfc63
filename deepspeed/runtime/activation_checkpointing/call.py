"""One checkpointed call: torch's checkpoint around it, our saved inputs, random states, boundaries and times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.clock import CudaEventTimer, mark, times_line
from deepspeed.log import print_dist
from deepspeed.runtime.activation_checkpointing.state import Plan
from deepspeed.runtime.activation_checkpointing.structure import rebuild, take_apart
from deepspeed.runtime.rng import get_cuda_rng_tracker

__all__ = ["FlatCall", "run"]


def run(
    plan: Plan,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    reentrant: bool,
    preserve_rng_state: bool = True,
) -> Any:
    """The function's outputs; in backward it is run again on the same inputs, from the same random states."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if plan.is_plain and torch.compiler.is_compiling():
        # The compiler knows torch's checkpoint, of which it has one variant, and could not look into ours.
        return torch_checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs)
    tensors, rest = take_apart((args, dict(kwargs)))
    states = get_cuda_rng_tracker().get_states() if preserve_rng_state else None
    call = (FlatCall if reentrant else _Call)(plan, function, rest, states)
    with plan.keeper.hooks():
        outputs = torch_checkpoint(call, *tensors, use_reentrant=reentrant, preserve_rng_state=preserve_rng_state)
    return rebuild(call.outputs, outputs) if isinstance(call, FlatCall) else outputs


class _Call:
    """What torch's checkpoint runs: with the tensors of the arguments, first in forward and again in backward."""

    def __init__(
        self, plan: Plan, function: Callable[..., Any], rest: Any, states: dict[str, torch.Tensor] | None
    ) -> None:
        self._plan = plan
        self._function = function
        self._rest = rest
        self._states = states
        self._again = False

    def __call__(self, *tensors: torch.Tensor) -> Any:
        again, self._again = self._again, True
        args, kwargs = rebuild(self._rest, tensors)
        with self._boundary("recompute" if again else "forward"), self._random_states(again), self._hooks(again):
            return self._function(*args, **kwargs)

    def _random_states(self, again: bool) -> AbstractContextManager[None]:
        """torch restores the generators of the CPU and of the devices; the tracker's states are ours."""
        if not again or self._states is None:
            return nullcontext()
        return get_cuda_rng_tracker().rewound(self._states)

    def _hooks(self, again: bool) -> AbstractContextManager[None]:
        """Around the body, torch's own hooks hide ours."""
        return nullcontext()

    @contextmanager
    def _boundary(self, what: str) -> Iterator[None]:
        settings = self._plan.settings
        synchronize = get_accelerator().synchronize if settings.synchronize_checkpoint_boundary else None
        if synchronize is not None:
            synchronize()
        start = mark() if settings.profile else None
        try:
            yield
        finally:
            if start is not None:
                print_dist(times_line({f"checkpoint {what}": CudaEventTimer(start, mark()).get_elapsed_msec()}))
            if synchronize is not None:
                synchronize()


class FlatCall(_Call):
    """The reentrant variant: results are the tuple of the tensors in them, `outputs` is the rest of the first ones.

    torch's reentrant variant is an autograd function, which follows the tensors of a tuple and none that is deeper.
    """

    outputs: Any = None

    def __call__(self, *tensors: torch.Tensor) -> Any:
        first = not self._again
        found, rest = take_apart(super().__call__(*tensors))
        if first:
            self.outputs = rest
        return tuple(found)

    def _hooks(self, again: bool) -> AbstractContextManager[None]:
        """What the body saves where it turns gradients on is none of the keeper's business."""
        if again or not self._plan.keeper.active:
            return nullcontext()
        return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
