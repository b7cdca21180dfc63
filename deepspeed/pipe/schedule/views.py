"""The classes that scripts know: instructions, and schedules as steps of instructions of one stage.

They are views: whoever subclasses or prints `TrainSchedule` sees the steps that it is published with. What the engine
runs is a `Schedule`, which computes the same in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from deepspeed.pipe.schedule.actions import Action, PassKind, Schedule
from deepspeed.pipe.schedule.generators import dual_pipe_v, folded
from deepspeed.pipe.schedule.generators import forward_only as forward_pass

__all__ = [
    "BackwardPass",
    "BufferOpInstruction",
    "CommitP2P",
    "DataParallelSchedule",
    "DualPipeVSchedule",
    "ForwardPass",
    "InferenceSchedule",
    "LoadMicroBatch",
    "OptimizerStep",
    "PipeInstruction",
    "PipeSchedule",
    "RecvActivation",
    "RecvGrad",
    "ReduceGrads",
    "ReduceTiedGrads",
    "SendActivation",
    "SendGrad",
    "TrainSchedule",
]


class PipeInstruction:
    """Something that a stage does; its arguments are its attributes."""

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        for name, value in kwargs.items():
            setattr(self, name, value)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.kwargs.items())})"


class OptimizerStep(PipeInstruction):
    """Take a step of the optimizer."""


class ReduceGrads(PipeInstruction):
    """Sum the gradients of the stage over its data-parallel ranks."""


class ReduceTiedGrads(PipeInstruction):
    """Sum the gradients of tied weights over the stages that have them."""


class CommitP2P(PipeInstruction):
    """Begin the sends and receives since the last one, and wait for those that are needed."""


class BufferOpInstruction(PipeInstruction):
    """Something with one of the buffers of a stage."""

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Take a micro-batch from the data."""


class ForwardPass(BufferOpInstruction):
    """Compute a forward."""


class BackwardPass(BufferOpInstruction):
    """Compute a backward."""


class SendActivation(BufferOpInstruction):
    """Send what a forward gave to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receive the input of a forward from the stage before."""


class SendGrad(BufferOpInstruction):
    """Send the gradients of a forward's input to the stage before."""


class RecvGrad(BufferOpInstruction):
    """Receive the gradients of what a forward gave from the next stage."""


class PipeSchedule(ABC):
    """Steps of one stage; `steps()` yields lists of instructions, and an iteration over the schedule does too."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches = micro_batches
        self.stages = stages
        self.stage_id = stage_id
        self.prev_stage = stage_id - 1
        self.next_stage = stage_id + 1
        self._steps: Iterator[list[PipeInstruction]] | None = None

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """What is done in each step."""

    def num_pipe_buffers(self) -> int:
        """Micro-batches that a stage holds at a time."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        return self.stage_id

    @property
    def num_stages(self) -> int:
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage_id == self.stages - 1

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch_id: int) -> int:
        return micro_batch_id % self.num_pipe_buffers()

    def __iter__(self) -> PipeSchedule:
        self._steps = None
        return self

    def __next__(self) -> list[PipeInstruction]:
        if self._steps is None:
            self._steps = self.steps()
        return next(self._steps)


class TrainSchedule(PipeSchedule):
    """1F1B in steps that all stages take at the same time: two for each micro-batch and for each stage but one."""

    def num_pipe_buffers(self) -> int:
        """One for each stage from here on, at least 2."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def steps(self) -> Iterator[list[PipeInstruction]]:
        total = 2 * (self.micro_batches + self.stages - 1)
        for step in range(total):
            forward = (step - self.stage_id) % 2 == 0
            now, before = self._micro_batch(step, forward), self._micro_batch(step - 1, not forward)
            commands = self._exchange(now, before, forward)
            if self._valid_micro_batch(now):
                commands += self._compute(self._buffer_idx(now), forward)
            if step == total - 1:
                commands += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield commands

    def _micro_batch(self, step: int, forward: bool) -> int:
        """Of which micro-batch a step is; one that does not exist where the stage waits."""
        return (step - self.stage_id if forward else step - 2 * self.stages + self.stage_id + 1) // 2

    def _exchange(self, now: int, before: int, forward: bool) -> list[PipeInstruction]:
        commands: list[PipeInstruction] = []
        here, there = self._valid_micro_batch(now), self._valid_micro_batch(before)
        if forward and self._valid_stage(self.prev_stage):
            commands += [SendGrad(self._buffer_idx(before))] if there else []
            commands += [RecvActivation(self._buffer_idx(now))] if here else []
        elif not forward and self._valid_stage(self.next_stage):
            commands += [RecvGrad(self._buffer_idx(now))] if here else []
            commands += [SendActivation(self._buffer_idx(before))] if there else []
        return commands

    def _compute(self, buffer: int, forward: bool) -> list[PipeInstruction]:
        if not forward:
            return [BackwardPass(buffer)]
        load = self.is_first_stage or self.is_last_stage
        return [*([LoadMicroBatch(buffer)] if load else []), ForwardPass(buffer)]


class InferenceSchedule(PipeSchedule):
    """Forwards one after the other, with two buffers."""

    def num_pipe_buffers(self) -> int:
        return 2  # one that is computed, one that is sent

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for step in range(self.micro_batches + self.stages - 1):
            now = step - self.stage_id
            here, there = self._valid_micro_batch(now), self._valid_micro_batch(now - 1)
            commands: list[PipeInstruction] = []
            if here and (self.is_first_stage or self.is_last_stage):
                commands.append(LoadMicroBatch(now % 2))
            receives: list[PipeInstruction] = [RecvActivation(now % 2)] if here and not self.is_first_stage else []
            sends: list[PipeInstruction] = [SendActivation((now - 1) % 2)] if there and not self.is_last_stage else []
            # Neighbours must not both send first: messages that nobody takes may wait for their receiver.
            commands += [*sends, *receives] if self.stage_id % 2 == 0 else [*receives, *sends]
            yield [*commands, ForwardPass(now % 2)] if here else commands


class DataParallelSchedule(PipeSchedule):
    """One stage: every micro-batch forward and backward, then the step."""

    def num_pipe_buffers(self) -> int:
        return 1

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for micro_batch in range(self.micro_batches):
            commands: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            if micro_batch == self.micro_batches - 1:
                commands += [ReduceGrads(), OptimizerStep()]
            yield commands


class DualPipeVSchedule(PipeSchedule):
    """DualPipeV; `phase` is 0 on the way down the ranks and 1 on the way up. A step for each computation."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int, forward_only: bool = False) -> None:
        super().__init__(micro_batches, stages, stage_id)
        self.forward_only = forward_only
        whole = dual_pipe_v(stages, micro_batches)
        self._schedule: Schedule = forward_pass(stages, micro_batches, folded(stages)) if forward_only else whole

    def num_pipe_buffers(self) -> int:
        """One for each micro-batch and phase."""
        return 2 * self.micro_batches

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for action in self._schedule.ranks[self.stage_id]:
            if action.op is not PassKind.WEIGHT:
                yield self._commands(action)
        if not self.forward_only:
            yield [CommitP2P(), ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]

    def _commands(self, action: Action) -> list[PipeInstruction]:
        schedule, forward = self._schedule, action.op is PassKind.FORWARD
        phase = int(action.stage >= self.stages)
        place = {"buffer_id": phase * self.micro_batches + action.micro_batch, "phase": phase}
        commands: list[PipeInstruction] = []
        if schedule.received(action) is not None:
            commands.append(RecvActivation(**place) if forward else RecvGrad(**place))
        commands.append(CommitP2P())
        if forward and action.stage in (0, schedule.stages - 1):
            commands.append(LoadMicroBatch(place["buffer_id"]))
        commands.append(ForwardPass(**place) if forward else BackwardPass(**place))
        if schedule.sent(action) is not None:
            commands.append(SendActivation(**place) if forward else SendGrad(**place))
        return commands
