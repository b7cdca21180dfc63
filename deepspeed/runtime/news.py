"""What an engine tells of an optimizer step: events, and a warning where there was nothing to update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepspeed.comm import Pending
from deepspeed.events import OverflowFound, StepFinished

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.step.stepper import Outcome

__all__ = ["finished", "overflow", "without_gradients"]


def overflow(engine: DeepSpeedEngine, outcome: Outcome) -> OverflowFound:
    """A step was skipped."""
    return OverflowFound(
        step=engine.global_steps,
        scale_before=outcome.scale_before,
        scale_after=outcome.scale_after,
        scaled=_scaled(engine, outcome),
        in_a_row=engine.skipped_in_a_row,
    )


def finished(
    engine: DeepSpeedEngine, outcome: Outcome, lr: tuple[float, ...], momentum: tuple[Any, ...]
) -> StepFinished:
    """A step is over; `lr` and `momentum` are those it was taken with."""
    loss = engine.loss_of_step
    return StepFinished(
        step=engine.global_steps,
        samples=engine.global_samples,
        applied=outcome.applied,
        skipped_steps=engine.skipped_steps,
        lr=lr,
        momentum=momentum,
        loss_scale=outcome.scale_before if _scaled(engine, outcome) else None,
        find_grad_norm=outcome.norm.wait,
        find_loss=loss.wait if isinstance(loss, Pending) else lambda: loss,
    )


def without_gradients(*, after_backward: bool) -> str:
    """What to say of a step for which no rank had a gradient."""
    if after_backward:
        found = (
            "engine.step() was called after a backward in which no rank has had a gradient of what the optimizer trains"
        )
        advice = "Let the loss depend on parameters of the optimizer that require gradients"
    else:
        found = "engine.step() was called, but no rank has had a gradient since the last step"
        advice = "Call engine.backward(loss) first"
    return f"{found}: nothing was updated, and no step is counted. {advice}."


def _scaled(engine: DeepSpeedEngine, outcome: Outcome) -> bool:
    return engine._parts.scale.dynamic or outcome.scale_before != 1.0
