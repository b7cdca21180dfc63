"""A `TrainSchedule` that a script replaced, or whose `steps` it replaced, as computations that the engine plays.

Loads, messages, reductions and the optimizer's step follow from the computations; where a step lists them does not
matter. An instruction of another class is carried out at its place by its handler in `PipelineEngine._INSTRUCTION_MAP`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deepspeed.errors import UsageError
from deepspeed.pipe.schedule import views
from deepspeed.pipe.schedule.actions import Action, PassKind, Schedule
from deepspeed.pipe.schedule.simulate import validate

Handlers = Mapping[type, Callable[..., Any]]
Calls = dict[int, list[Callable[[Any], Any]]]
"""What to call with the engine before which computation of a rank; behind the last one for their number."""

_KIND, _STEPS = views.TrainSchedule, views.TrainSchedule.steps
_BASES = (views.PipeInstruction, views.BufferOpInstruction)
KNOWN = tuple(
    kind
    for kind in vars(views).values()
    if isinstance(kind, type) and issubclass(kind, views.PipeInstruction) and kind not in _BASES
)


def replaced_schedule() -> type[views.PipeSchedule] | None:
    """The class in the place of `TrainSchedule`; None where scripts left it alone."""
    found = views.TrainSchedule
    return None if found is _KIND and found.steps is _STEPS else found


def read_steps(
    kind: type[views.PipeSchedule], stages: int, micro_batches: int, stage: int, handlers: Handlers
) -> tuple[Schedule, Calls]:
    """The computations of all stages, and the calls of one of them."""
    rows, calls = [], {}
    for each in range(stages):
        row, own = _row(kind(micro_batches=micro_batches, stages=stages, stage_id=each), handlers)
        rows.append(row)
        if each == stage:
            calls = own
    made = Schedule(kind.__name__, micro_batches, tuple(range(stages)), tuple(rows), (micro_batches,) * stages)
    return validate(made), calls


def _row(schedule: views.PipeSchedule, handlers: Handlers) -> tuple[tuple[Action, ...], Calls]:
    actions: list[Action] = []
    in_buffer: dict[int, int] = {}
    calls: Calls = {}
    forwards = 0
    for command in (command for step in schedule.steps() for command in step):
        if type(command) in handlers and type(command) not in KNOWN:
            calls.setdefault(len(actions), []).append(_call(handlers[type(command)], command))
        elif isinstance(command, views.ForwardPass):
            in_buffer[command.kwargs["buffer_id"]] = forwards
            actions.append(Action(PassKind.FORWARD, schedule.stage_id, forwards))
            forwards += 1
        elif isinstance(command, views.BackwardPass):
            number = in_buffer.pop(command.kwargs["buffer_id"], None)
            if number is None:
                raise UsageError(f"{type(schedule).__name__}: {command} has no forward before it in that buffer")
            actions.append(Action(PassKind.BACKWARD, schedule.stage_id, number))
        elif not isinstance(command, KNOWN):
            raise UsageError(
                f"{type(schedule).__name__} has the instruction {command}, which is not known; add "
                f"{type(command).__name__} and its handler to PipelineEngine._INSTRUCTION_MAP"
            )
    return tuple(actions), calls


def _call(handler: Callable[..., Any], command: views.PipeInstruction) -> Callable[[Any], Any]:
    return lambda engine: handler(engine, **command.kwargs)
