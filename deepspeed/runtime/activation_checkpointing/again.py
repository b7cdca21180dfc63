"""A checkpointed call whose caller decides what is computed when it has run again: also a part of its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from deepspeed.runtime.activation_checkpointing.call import FlatCall
from deepspeed.runtime.activation_checkpointing.state import Plan
from deepspeed.runtime.activation_checkpointing.structure import rebuild, take_apart
from deepspeed.runtime.rng import get_cuda_rng_tracker

__all__ = ["InnerBackward", "run_again_by"]

InnerBackward = Callable[[Sequence[Tensor], Sequence[Tensor | None], Sequence[Tensor]], None]
"""(outputs, their gradients, inputs) → gradients on the inputs that require some, which are leaves."""


def run_again_by(plan: Plan, function: Callable[..., Any], backward: InnerBackward, args: tuple[Any, ...]) -> Any:
    """The function's outputs; in backward it is run again, and `backward` follows."""
    tensors, rest = take_apart((args, {}))
    call = FlatCall(plan, function, rest, get_cuda_rng_tracker().get_states())
    with plan.keeper.hooks():
        outputs: Any = _Again.apply(call, backward, *tensors)  # type: ignore[no-untyped-call]
    return rebuild(call.outputs, outputs)


class _Conditions:
    """Generators and autocast as they are now."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._host = torch.get_rng_state()
        self._devices, self._states = get_device_states(*tensors)
        kinds = sorted({"cpu", *(tensor.device.type for tensor in tensors)})
        self._autocast = [(k, torch.get_autocast_dtype(k), torch.is_autocast_enabled(k)) for k in kinds]
        self._kind = next((kind for kind in kinds if kind != "cpu"), "cuda")

    @contextmanager
    def restored(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=self._devices, device_type=self._kind))
            torch.set_rng_state(self._host)
            if self._devices:
                set_device_states(self._devices, self._states, device_type=self._kind)
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield


class _Again(torch.autograd.Function):
    """Keeps the inputs alone."""

    @staticmethod
    def forward(ctx: Any, call: FlatCall, backward: InnerBackward, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.inner = call, backward
        ctx.trained = [tensor.requires_grad for tensor in tensors]
        ctx.conditions = _Conditions(tensors)
        ctx.save_for_backward(*tensors)
        outputs: tuple[Tensor, ...] = call(*tensors)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        pairs = zip(ctx.saved_tensors, ctx.trained, strict=True)
        inputs = [tensor.detach().requires_grad_(trained) for tensor, trained in pairs]
        with ctx.conditions.restored(), torch.enable_grad():
            outputs = ctx.call(*inputs)
        ctx.inner(outputs, grads, [each for each in inputs if each.requires_grad])
        return None, None, *(each.grad for each in inputs)
