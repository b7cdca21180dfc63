"""The classes that scripts know: the steps that they are published with.

`published_steps.txt` was recorded with DeepSpeed 0.19.8: class, micro-batches, stages, stage, buffers, and the steps
with a letter for each instruction and its buffer.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspeed.errors import UsageError
from deepspeed.pipe.schedule import views as schedules
from deepspeed.pipe.schedule.views import DualPipeVSchedule, ForwardPass, PipeInstruction, PipeSchedule, TrainSchedule

LETTERS = {
    "LoadMicroBatch": "L",
    "ForwardPass": "F",
    "BackwardPass": "B",
    "SendActivation": "A",
    "RecvActivation": "a",
    "SendGrad": "G",
    "RecvGrad": "g",
    "ReduceTiedGrads": "t",
    "ReduceGrads": "r",
    "OptimizerStep": "o",
}
PUBLISHED = Path(__file__).with_name("published_steps.txt").read_text(encoding="utf-8").splitlines()


def coded(schedule: PipeSchedule) -> str:
    return "|".join(
        "".join(f"{LETTERS[each.name]}{each.kwargs.get('buffer_id', '')}" for each in step) for step in schedule.steps()
    )


def test_steps_are_the_published_ones():
    assert len(PUBLISHED) > 50
    for line in PUBLISHED:
        name, micro_batches, stages, stage, buffers, *steps = line.split(" ")
        schedule = getattr(schedules, name)(int(micro_batches), int(stages), int(stage))
        assert schedule.num_pipe_buffers() == int(buffers), line
        assert coded(schedule) == "".join(steps), line


def test_instructions_carry_their_arguments():
    instruction = ForwardPass(3, phase=1)
    assert repr(instruction) == "ForwardPass(buffer_id=3, phase=1)"
    assert (instruction.name, instruction.buffer_id, instruction.phase) == ("ForwardPass", 3, 1)
    assert isinstance(instruction, PipeInstruction)


def test_a_schedule_is_an_iterator():
    schedule = TrainSchedule(2, 2, 1)
    assert (schedule.stage, schedule.num_stages, schedule.num_micro_batches) == (1, 2, 2)
    assert not schedule.is_first_stage
    assert schedule.is_last_stage
    assert list(map(repr, schedule)) == list(map(repr, schedule.steps()))
    assert len(list(schedule)) == 2 * (2 + 2 - 1)


def test_dual_pipe_v_in_phases():
    schedule = DualPipeVSchedule(4, 2, 0)
    forwards = [each for step in schedule for each in step if isinstance(each, ForwardPass)]
    assert sorted(each.buffer_id for each in forwards) == list(range(schedule.num_pipe_buffers()))
    assert [each.phase for each in forwards[:3]] == [0, 0, 0]
    only = list(DualPipeVSchedule(4, 2, 0, forward_only=True))
    assert not any(each.name in ("BackwardPass", "OptimizerStep") for step in only for each in step)
    with pytest.raises(UsageError, match="at least 4 micro-batches; found 2"):
        DualPipeVSchedule(2, 2, 0)
