"""What is left of an engine after `destroy()`: errors that say so, and a model that can be wrapped again."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from deepspeed.errors import UsageError

if TYPE_CHECKING:
    from deepspeed.runtime.parts import Parts

_REMAINS = ("accumulation", "batch", "flops_profiler", "layout", "memory_profiler", "precision", "scale")


class Destroyed:
    """Takes the place of an engine's collaborators once they are closed; sizes and what was measured remain."""

    def __init__(self, parts: Parts, place: str) -> None:
        """`place` is the line that called `destroy()`."""
        self._place = place
        vars(self).update({name: getattr(parts, name) for name in _REMAINS})

    def __getattr__(self, name: str) -> Any:
        raise UsageError(
            f"this engine was destroyed at {self._place}, and its optimizer, hooks and groups are gone. Call "
            "deepspeed.initialize again with engine.module to go on with the model; if a client library made the "
            "engine, let that prepare the model again (Accelerate: accelerator.prepare)"
        )


def close(parts: Parts) -> None:
    """Close what an engine is made of, and let go of optimizer, states and gradients."""
    try:
        parts.resources.close()
    finally:
        parts.optimizer = parts.basic_optimizer = parts.lr_scheduler = None
        parts.states = parts.stepper = None
        for param in parts.module.parameters():
            param.grad = None
        _let_trainers_wrap_again()


def without_destroyed_engine(model: Any) -> Any:
    """The model inside of an engine that was destroyed; anything else as it is."""
    return model.module if isinstance(getattr(model, "_parts", None), Destroyed) else model


def _let_trainers_wrap_again() -> None:
    """Let Transformers' Trainer, if it is loaded, make a new engine for a model whose engine was destroyed.

    `Trainer.train()` has Accelerate destroy the engine of an earlier `evaluate()` or `train()`, but keeps it as its
    wrapped model, and what is wrapped it does not prepare.
    """
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    wrap = getattr(trainer, "_wrap_model", None)
    if trainer is None or wrap is None or getattr(wrap, "looks_through_engines", False):
        return

    @functools.wraps(wrap)
    def wrap_again(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        return wrap(self, without_destroyed_engine(model), *args, **kwargs)

    wrap_again.looks_through_engines = True  # type: ignore[attr-defined]  # a mark of our own: `wraps` is common
    trainer._wrap_model = wrap_again
