"""Methods of DeepSpeed's engine that scripts replace: those that are called here, and a warning for the others."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deepspeed.errors import UsageError
from deepspeed.events import StepFinished
from deepspeed.log import warn_once

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

# method of DeepSpeed's engine that is never called here → what to use to change the same
NOT_CALLED: dict[str, str] = {
    "_broadcast_model": "change parameters before deepspeed.initialize, which sends those of rank 0 to all ranks",
    "_configure_optimizer": "pass optimizer= to deepspeed.initialize",
    "_copy_recovery_script": "copy files after engine.save_checkpoint; set checkpoint keys in the config",
    "_save_moe_checkpoint": "assign an object of your own to engine.checkpoint_engine",
    "load_moe_state_dict": "engine.load_checkpoint loads experts at any number of ranks",
    "print_forward_breakdown": "set wall_clock_breakdown in the config",
}


class NotCalled:
    """Stands for a method of `NOT_CALLED`: an error when called, a warning when a script replaces it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.__doc__ = f"Never called; {NOT_CALLED[name]}."

    def __get__(self, engine: Any, owner: type) -> Callable[..., Any]:
        if engine is not None and self.name in vars(engine):
            replaced: Callable[..., Any] = vars(engine)[self.name]
            return replaced
        return self

    def __set__(self, engine: Any, value: Any) -> None:
        warn_of(f"engine.{self.name}", NOT_CALLED[self.name])
        vars(engine)[self.name] = value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(f"engine.{self.name}() does nothing here: {NOT_CALLED[self.name]}")


def warn_of(what: str, instead: str) -> None:
    """A script replaced something that is not used."""
    warn_once(f"{what} was replaced by the script, which has no effect here. {instead[0].upper()}{instead[1:]}.")


def is_replaced(engine: DeepSpeedEngine, name: str, base: type) -> bool:
    """True if a subclass or a script put another method in the place of the one in `base`'s source."""
    found = inspect.getattr_static(engine, name)
    return getattr(found, "__module__", None) != base.__module__


def heed(engine: DeepSpeedEngine, base: type) -> None:
    """Use the replaced methods that have a place in the step, warn of the others; once the engine is whole."""
    for name, instead in NOT_CALLED.items():
        if not isinstance(inspect.getattr_static(engine, name), NotCalled):
            warn_of(f"{base.__name__}.{name}", instead)
    home = sys.modules[base.__module__]
    if "MoE" in vars(home) and vars(home)["MoE"].__module__ != "deepspeed.moe.layer":
        warn_of(f"{base.__module__}.MoE", "layers of experts are found by deepspeed.moe.layer.MoE; subclass that")
    parts = engine._parts
    every = parts.config.schema.steps_per_print
    if every is not None and is_replaced(engine, "_report_progress", base) and parts.step_line is not None:
        parts.step_line.close()

        def report(_: StepFinished) -> None:
            if engine.global_steps % every == 0:
                engine._report_progress(engine.global_steps)

        parts.resources.callback(engine.events.subscribe(StepFinished, report).close)
    if is_replaced(engine, "clip_fp32_gradients", base):
        if parts.stepper is not None and parts.stepper.clips_in_place:
            parts.stepper.clip = engine.clip_fp32_gradients
        else:
            warn_of(
                f"{base.__name__}.clip_fp32_gradients",
                "it is used where gradients are whole and in fp32: at zero_optimization.stage 0 without bf16, fp16 and "
                "offload, with gradient_clipping above 0; elsewhere gradient_clipping clips by the norm over all ranks",
            )
