"""One checkpointed call: torch's checkpoint around it, our saved inputs, random states, boundaries and times."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import get_device_states, set_device_states

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.clock import CudaEventTimer, mark, times_line
from deepspeed.log import print_dist
from deepspeed.runtime.activation_checkpointing.configuration import CheckpointingPlan
from deepspeed.runtime.rng import get_cuda_rng_tracker


@dataclass(frozen=True, slots=True)
class _TensorPlace:
    """Stands where a tensor was."""

    index: int


def split_tensors(tree: Any) -> tuple[list[torch.Tensor], Any]:
    """(tensors, rest): the tensors in tuples, lists and dicts, however deep, and the same tree without them.

    Other objects are not looked into. What holds no tensor stays the very same object.
    """
    tensors: list[torch.Tensor] = []
    return tensors, _strip(tree, tensors)


def join_tensors(rest: Any, tensors: Sequence[Any]) -> Any:
    """The tree that `split_tensors` saw, with these tensors in it."""
    return tensors[rest.index] if isinstance(rest, _TensorPlace) else _mapped(rest, join_tensors, tensors)


# No nested functions here: one that calls itself is a reference cycle, which would hold the tensors until the garbage
# collector comes along.


def _strip(node: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(node, torch.Tensor):
        tensors.append(node)
        return _TensorPlace(len(tensors) - 1)
    return _mapped(node, _strip, tensors)


def _mapped(node: Any, change: Callable[[Any, Any], Any], tensors: Sequence[Any]) -> Any:
    """The container with `change` applied to what it holds; the container itself if nothing in it changed."""
    kind = type(node)
    if isinstance(node, dict):
        changed = {key: change(value, tensors) for key, value in node.items()}
        if all(changed[key] is value for key, value in node.items()):
            return node
        made = copy.copy(node)  # keeps what subclasses know besides their items
        for key, value in changed.items():
            made[key] = value
        return made
    if kind in (tuple, list) or (isinstance(node, tuple) and isinstance(getattr(kind, "_fields", None), tuple)):
        items = [change(item, tensors) for item in node]
        if all(new is old for new, old in zip(items, node, strict=True)):
            return node
        return kind(items) if kind in (tuple, list) else kind(*items)
    return node


def run(
    plan: CheckpointingPlan,
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
    tensors, rest = split_tensors((args, dict(kwargs)))
    states = get_cuda_rng_tracker().get_states() if preserve_rng_state else None
    call = _CheckpointedCall(plan, function, rest, states, flat=reentrant)
    with plan.keeper.hooks():
        outputs = torch_checkpoint(call, *tensors, use_reentrant=reentrant, preserve_rng_state=preserve_rng_state)
    return join_tensors(call.outputs, outputs) if reentrant else outputs


class _CheckpointedCall:
    """What torch's checkpoint runs: with the tensors of the arguments, first in forward and again in backward.

    torch's reentrant variant is an autograd function, which follows the tensors of a tuple and none that is deeper. For
    it results are `flat`, the tuple of the tensors in them, and `outputs` is the rest of the first ones.
    """

    def __init__(
        self,
        plan: CheckpointingPlan,
        function: Callable[..., Any],
        rest: Any,
        states: dict[str, torch.Tensor] | None,
        *,
        flat: bool,
    ) -> None:
        self._plan = plan
        self._function = function
        self._rest = rest
        self._states = states
        self._flat = flat
        self._again = False
        self.outputs: Any = None

    def __call__(self, *tensors: torch.Tensor) -> Any:
        again, self._again = self._again, True
        args, kwargs = join_tensors(self._rest, tensors)
        with ExitStack() as stack:
            stack.enter_context(self._boundary("recompute" if again else "forward"))
            if again and self._states is not None:
                # torch restores the generators of the CPU and of the devices; the tracker's states are ours
                stack.enter_context(get_cuda_rng_tracker().rewound(self._states))
            if self._flat and not again and self._plan.keeper.active:
                # the keeper must not see what the body saves; torch's own hooks of the other variant hide it too
                stack.enter_context(saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor))
            result = self._function(*args, **kwargs)
        if not self._flat:
            return result
        found, rest = split_tensors(result)
        if not again:
            self.outputs = rest
        return tuple(found)

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


InnerBackward = Callable[[Sequence[Tensor], Sequence[Tensor | None], Sequence[Tensor]], None]
"""(outputs, their gradients, inputs) → gradients on the inputs that require some, which are leaves."""


def recompute_by(
    plan: CheckpointingPlan, function: Callable[..., Any], backward: InnerBackward, args: tuple[Any, ...]
) -> Any:
    """The function's outputs; in backward it is run again, and `backward` follows."""
    tensors, rest = split_tensors((args, {}))
    call = _CheckpointedCall(plan, function, rest, get_cuda_rng_tracker().get_states(), flat=True)
    with plan.keeper.hooks():
        outputs: Any = _Recompute.apply(call, backward, *tensors)  # type: ignore[no-untyped-call]
    return join_tensors(call.outputs, outputs)


class RecomputeContext:
    """Generators and autocast as they are now."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._host = torch.get_rng_state()
        self._devices, self._states = get_device_states(*tensors)
        kinds = sorted({"cpu", *(tensor.device.type for tensor in tensors)})
        self._autocast = [(k, torch.get_autocast_dtype(k), torch.is_autocast_enabled(k)) for k in kinds]
        self._kind = next((kind for kind in kinds if kind != "cpu"), "cuda")

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The same again inside the context, for a recomputation."""
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=self._devices, device_type=self._kind))
            torch.set_rng_state(self._host)
            if self._devices:
                set_device_states(self._devices, self._states, device_type=self._kind)
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield


class _Recompute(torch.autograd.Function):
    """Keeps the inputs alone."""

    @staticmethod
    def forward(ctx: Any, call: _CheckpointedCall, backward: InnerBackward, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.inner = call, backward
        ctx.trained = [tensor.requires_grad for tensor in tensors]
        ctx.conditions = RecomputeContext(tensors)
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
