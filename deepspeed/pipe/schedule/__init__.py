"""Schedules of a pipeline: data, generators, a validator, a simulator, and the classes that scripts know.

```
actions      what a schedule is;  generators, v_shaped: how they are made;  names: by the config's names
validate     complete, in order, ends, within its memory;  simulate: when what happens;  show: text and pictures
views        PipeSchedule, TrainSchedule, … and instruction classes
```
"""

from __future__ import annotations

from deepspeed.pipe.schedule.actions import Action, Message, PassKind, Schedule
from deepspeed.pipe.schedule.generators import (
    SCHEDULES,
    dual_pipe_v,
    forward_only,
    gpipe,
    interleaved,
    make,
    one_f_one_b,
    zb_h1,
    zbv,
)
from deepspeed.pipe.schedule.simulate import Costs, Timeline, simulate, validate
from deepspeed.pipe.schedule.views import (
    BackwardPass,
    BufferOpInstruction,
    CommitP2P,
    DataParallelSchedule,
    DualPipeVSchedule,
    ForwardPass,
    InferenceSchedule,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
    TrainSchedule,
)

__all__ = [
    "SCHEDULES",
    "Action",
    "BackwardPass",
    "BufferOpInstruction",
    "CommitP2P",
    "Costs",
    "DataParallelSchedule",
    "DualPipeVSchedule",
    "ForwardPass",
    "InferenceSchedule",
    "LoadMicroBatch",
    "Message",
    "OptimizerStep",
    "PassKind",
    "PipeInstruction",
    "PipeSchedule",
    "RecvActivation",
    "RecvGrad",
    "ReduceGrads",
    "ReduceTiedGrads",
    "Schedule",
    "SendActivation",
    "SendGrad",
    "Timeline",
    "TrainSchedule",
    "dual_pipe_v",
    "forward_only",
    "gpipe",
    "interleaved",
    "make",
    "one_f_one_b",
    "simulate",
    "validate",
    "zb_h1",
    "zbv",
]
