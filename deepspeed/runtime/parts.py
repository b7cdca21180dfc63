"""What an engine is made of: the collaborators that `_assemble` puts together and the engine owns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from deepspeed.checkpoint.formats.training_state import PipelineLayers
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.batch import BatchSizes
from deepspeed.config.zero import OffloadStateTypeEnum
from deepspeed.data.pacing import Pacing
from deepspeed.events import EventStream
from deepspeed.memory.host import ParkedStorages
from deepspeed.moe.placement import SpreadExperts
from deepspeed.parallel import ParallelLayout
from deepspeed.precision.policy import Precision
from deepspeed.precision.scale import LossScale
from deepspeed.runtime.accumulation import Accumulation
from deepspeed.runtime.backward import Backward
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.step.stepper import Stepper
from deepspeed.zero.interface import GradientReducer, LiesOn, OptimizerStates, ZeroModel

if TYPE_CHECKING:
    from deepspeed.runtime.model_kind import ModelKind


@dataclass
class Parts:
    """What an engine is made of; put together by `_assemble`."""

    config: DeepSpeedConfig
    module: nn.Module
    kind: ModelKind
    """Whether the module is a whole model or stages of a pipeline."""
    device: torch.device
    local_rank: int
    layout: ParallelLayout
    precision: Precision
    scale: LossScale
    accumulation: Accumulation
    reducer: GradientReducer
    backward: Backward
    events: EventStream
    forward: Callable[..., Any]
    """Calls the module, with casts and autocast as the config asks."""
    make_loader: Callable[..., Any]
    resources: ExitStack
    """Whatever has to be closed with the engine."""
    sharded: ZeroModel
    """What holds the states of the model and moves its gradients and parameters."""
    lies_on: LiesOn
    """The ranks that hold the same elements of a parameter."""
    experts: SpreadExperts | None = None
    """The layers of experts of the model; None: it has none."""
    states: OptimizerStates | None = None
    """What the optimizer updates; None without an optimizer."""
    stepper: Stepper | None = None
    optimizer: Optimizer | DeepSpeedOptimizer | None = None
    basic_optimizer: Optimizer | None = None
    lr_scheduler: Any = None
    training_dataloader: Any = None
    pacing: Pacing | None = None
    """What of a forward pass changes with the step; None: nothing does."""
    mpu: Any = None
    monitor: Any = None
    timers: Any = None
    tput_timer: Any = None
    step_line: Any = None
    """What writes the line of `steps_per_print`; None where there is none."""
    flops_profiler: Any = None
    memory_profiler: Any = None
    layers: PipelineLayers | None = None
    """Of a pipeline: the layers that have a file of their own in a checkpoint."""
    holds: Callable[[str], bool] | None = None
    """Of a pipeline: whether a name of the whole model lies on this rank."""
    parking: ParkedStorages = field(default_factory=ParkedStorages)
    """What `engine.offload_states` moved to host memory, for a while."""
    moved: set[OffloadStateTypeEnum] = field(default_factory=set)
    """The kinds of it."""
    batch: BatchSizes | None = field(init=False)
    """The sizes in use: those of the config until the script sets others."""

    def __post_init__(self) -> None:
        self.batch = self.config.batch

    def name_of(self, name: str) -> str:
        """What a parameter or buffer of this rank's module is called in the whole model."""
        return name if self.experts is None else self.experts.name_of(name)
