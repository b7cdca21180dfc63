"""Events: what happened, told to whoever listens; nothing that watches is imported by anything that works."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

E = TypeVar("E")

AHEAD = "gradients, ahead of their backward"
"""The range (`record_function`) around what a forward computes for its backward: it is not taken for its own."""


class Phase(str, Enum):
    """The parts of a training step that are timed, as they nest."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INNER = "backward_inner"
    """Autograd alone."""
    BACKWARD_REDUCE = "backward_allreduce"
    """What is left of gradient reduction once autograd has finished."""
    STEP = "step"
    """Clipping, the optimizer and the schedule."""


@dataclass(frozen=True, slots=True)
class PhaseBegan:
    """A phase of a micro step starts; nothing has been launched for it yet."""

    phase: Phase
    micro_step: int
    """Micro steps since the engine was built, this one included from 0."""
    at_boundary: bool
    """This micro step ends with an optimizer step."""


@dataclass(frozen=True, slots=True)
class PhaseFinished:
    """A phase has returned; its device work may still be running."""

    phase: Phase
    micro_step: int
    at_boundary: bool


@dataclass(frozen=True, slots=True)
class PhaseFailed:
    """A phase ended with an error, which listeners may add words to."""

    phase: Phase
    error: BaseException


@dataclass(frozen=True, slots=True)
class OverflowFound:
    """A gradient was inf or NaN: the optimizer step was skipped on every rank."""

    step: int
    scale_before: float
    scale_after: float
    scaled: bool = True
    """The loss is scaled; elsewhere there is no scale to lower."""
    in_a_row: int = 1
    """Steps that were skipped without one between them that was taken, this one included."""


@dataclass(frozen=True, slots=True)
class StepFinished:
    """An optimizer step was taken, or skipped because of an overflow."""

    step: int
    """Optimizer steps since training began, skipped ones included: `engine.global_steps`."""
    samples: int
    """Samples since training began, over all data-parallel ranks: `engine.global_samples`."""
    applied: bool
    skipped_steps: int
    lr: tuple[float, ...]
    """Per parameter group, as used by this step."""
    momentum: tuple[Any, ...]
    """Per parameter group: betas or momentum, where the optimizer has them."""
    loss_scale: float | None
    """None where the loss is not scaled."""
    find_grad_norm: Callable[[], Any]
    find_loss: Callable[[], Any]
    """Both may wait for other ranks, so that only who reads what they find waits."""

    @property
    def grad_norm(self) -> Any:
        """Global norm before clipping: a number, a tensor that is still being computed, or None."""
        return self.find_grad_norm()

    @property
    def loss(self) -> Any:
        """This rank's losses of the step's micro batches: a tensor that is still being computed, or None."""
        return self.find_loss()


@dataclass(frozen=True, slots=True)
class RunContinued:
    """A checkpoint was loaded: training goes on where that run was."""

    step: int
    """Optimizer steps since training began, as the last `StepFinished` before that checkpoint told."""


@dataclass(frozen=True, slots=True)
class CheckpointBegan:
    """All ranks start to save a checkpoint."""

    step: int
    tag: str
    folder: str


@dataclass(frozen=True, slots=True)
class CheckpointFinished:
    """A checkpoint can be loaded; told by the thread that writes where it is written in the background."""

    step: int
    tag: str
    folder: str
    seconds: float


@dataclass(frozen=True, slots=True)
class LayerUse:
    """What the router of one layer of experts chose."""

    counts: tuple[int, ...]
    """Assignments of each expert."""
    dropped: int
    """Assignments that no expert took, because it was full."""

    @property
    def loads(self) -> tuple[float, ...]:
        """Of each expert, as a multiple of an equal share."""
        mean = sum(self.counts) / len(self.counts)
        return tuple(count / mean if mean else 0.0 for count in self.counts)

    @property
    def entropy(self) -> float:
        """Of the load: 1 where all experts have as many, 0 where one has all."""
        total = sum(self.counts)
        shares = [count / total for count in self.counts if count]
        return sum(share * math.log(1 / share) for share in shares) / math.log(max(len(self.counts), 2))


@dataclass(frozen=True, slots=True)
class ExpertsUsed:
    """What all routers chose in the forwards of a step, over all ranks; told when the next step is through."""

    step: int
    samples: int
    layers: Mapping[str, LayerUse]
    """By the path of the layer in the model."""


@dataclass(frozen=True, slots=True)
class RolloutCompared:
    """Log-probabilities of generated tokens beside those of the trainer, over all ranks."""

    samples: int
    """Samples that were trained on so far."""
    tokens: int
    mean: float
    """Of the absolute differences."""
    largest: float


class Subscription:
    """One listener of one kind of event; `close()` ends it, and so does leaving a `with` block."""

    __slots__ = ("_handler", "_kind", "_stream")

    def __init__(self, stream: EventStream, kind: type, handler: Callable[[Any], None]) -> None:
        self._stream = stream
        self._kind = kind
        self._handler = handler

    def close(self) -> None:
        """Stop listening; closing twice is harmless."""
        self._stream._drop(self._kind, self._handler)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class EventStream:
    """Passes events to their subscribers in the order of subscription.

    An emitter guards with `if stream.wants(Kind):`, so that with no listener an event is not even built.
    """

    __slots__ = ("_handlers",)

    def __init__(self) -> None:
        self._handlers: dict[type, tuple[Callable[[Any], None], ...]] = {}

    def wants(self, kind: type) -> bool:
        """True if somebody listens to this kind."""
        return kind in self._handlers

    def wants_any(self, kinds: Collection[type]) -> bool:
        """True if somebody listens to one of these kinds."""
        return not self._handlers.keys().isdisjoint(kinds)

    def emit(self, event: object) -> None:
        """Hand `event` to the listeners of its exact type."""
        for handler in self._handlers.get(type(event), ()):
            handler(event)

    def subscribe(self, kind: type[E], handler: Callable[[E], None]) -> Subscription:
        """Call `handler` with every later event of `kind` until the subscription is closed."""
        self._handlers[kind] = (*self._handlers.get(kind, ()), handler)
        return Subscription(self, kind, handler)

    def _drop(self, kind: type, handler: Callable[[Any], None]) -> None:
        left = tuple(h for h in self._handlers.get(kind, ()) if h is not handler)
        if left:
            self._handlers[kind] = left
        else:
            self._handlers.pop(kind, None)
