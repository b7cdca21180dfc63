"""How inputs of checkpointed calls are kept: settings of engines and scripts, the axis, and the keeper they make.

[Note: saved inputs]
torch.utils.checkpoint saves a call's input tensors through autograd, reentrant or not. A pair of saved-tensor hooks
around it therefore sees exactly those tensors, in the order of the arguments: `keep` turns each into what waits, and
`give_back` into a tensor of the same values, shape and strides when the call is about to be run again. Hooks that are
opened inside (torch's own, of the non-reentrant variant, and ours in `call.py`) hide this pair from the call's body.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.config import DeepSpeedConfig, Schema, load
from deepspeed.config.memory import ActivationCheckpointingConfig
from deepspeed.errors import DeepSpeedConfigError, LayoutError
from deepspeed.log import warn_once
from deepspeed.memory.streaming import on_device
from deepspeed.parallel import AxisGroup
from deepspeed.parallel.layout import ParallelLayout
from deepspeed.runtime.activation_checkpointing.offload import (
    ActivationOffload,
    BufferSlot,
    CallGroup,
    CheckpointBuffers,
    KeptTensor,
    OffloadedTensor,
    StridedForm,
    flattened,
    is_expanded,
)

SECTION = "activation_checkpointing"

# key of the config section → the argument of configure() that overrides it
ARGUMENTS = {
    "partition_activations": "partition_activations",
    "cpu_checkpointing": "checkpoint_in_cpu",
    "contiguous_memory_optimization": "contiguous_checkpointing",
    "number_checkpoints": "num_checkpoints",
    "synchronize_checkpoint_boundary": "synchronize",
    "profile": "profile",
}
_COUNTS = {"number_checkpoints": 1, "keep_last_count": 0}  # the least of each


@dataclass(frozen=True, slots=True)
class CheckpointingSettings:
    """How saved inputs are kept; the fields are the keys of the config section."""

    partition_activations: bool = False
    cpu_checkpointing: bool = False
    contiguous_memory_optimization: bool = False
    number_checkpoints: int | None = None
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False
    keep_last_count: int = 1

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> CheckpointingSettings:
        """Checked settings; what is not given has its default."""
        for key, value in values.items():
            least = _COUNTS.get(key)
            if least is None and not isinstance(value, bool):
                raise _error(key, f"found {value!r}, expected true or false")
            if least is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise _error(key, f"found {value!r}, expected a whole number from {least} on")
        settings = cls(**values)
        if settings.contiguous_memory_optimization:
            for key in ("partition_activations", "number_checkpoints"):
                if not getattr(settings, key):
                    raise _error(
                        "contiguous_memory_optimization",
                        f"one buffer for all saved inputs needs {key} ({ARGUMENTS[key]}=), found "
                        f"{getattr(settings, key)}. Set it, or turn contiguous_memory_optimization off",
                    )
        return settings


def given_settings(section: ActivationCheckpointingConfig) -> dict[str, Any]:
    """The keys that the user wrote in the section, with their values; null means not given."""
    keys = (*ARGUMENTS, "keep_last_count")
    values = {key: getattr(section, key) for key in keys if key in section.model_fields_set}
    return {key: value for key, value in values.items() if value is not None}


def section_of(config: Any) -> ActivationCheckpointingConfig:
    """The section of a config in any of its forms: loaded, a dict, a file, base64 text, or the section itself."""
    if isinstance(config, ActivationCheckpointingConfig):
        return config
    if isinstance(config, DeepSpeedConfig):
        return config.schema.activation_checkpointing
    schema = config if isinstance(config, Schema) else load(config, partial=True).schema
    return schema.activation_checkpointing


def _error(key: str, text: str) -> DeepSpeedConfigError:
    path = f"{SECTION}.{key}"
    argument = f" (argument {ARGUMENTS[key]} of configure)" if key in ARGUMENTS else ""
    return DeepSpeedConfigError(f"{path}{argument}: {text}.", path=path)


# The X of get_X_parallel_{world_size,rank,group}; the "model" of a pipeline grid spans its stages, so it comes last.
_SPELLINGS = ("tensor_model", "slice", "model")


@dataclass(frozen=True, slots=True)
class ModelAxis:
    """The ranks of an mpu that compute with the same activations; without an mpu this rank alone."""

    size: int = 1
    rank: int = 0
    mpu: Any = None
    spelling: str = ""

    @property
    def group(self) -> ProcessGroup:
        if self.mpu is None:
            raise LayoutError(
                "there is no model-parallel group: no mpu was given to deepspeed.checkpointing.configure, and no "
                "engine with tensor parallelism exists. Give an mpu."
            )
        group = getattr(self.mpu, f"get_{self.spelling}_parallel_group")()
        if not isinstance(group, ProcessGroup) or group.size() != self.size:
            found = f"{group.size()} ranks" if isinstance(group, ProcessGroup) else f"a {type(group).__name__}"
            raise LayoutError(
                f"the mpu's get_{self.spelling}_parallel_group() gave {found}; expected a process group of "
                f"{self.size} ranks, as get_{self.spelling}_parallel_world_size() says. Correct the mpu."
            )
        return group


ALONE = ModelAxis()


def model_axis(source: Any) -> ModelAxis | AxisGroup:
    """The tensor-parallel axis of a layout or of an mpu; an mpu without one says its whole model-parallel group."""
    if isinstance(source, ParallelLayout):
        source.create_groups("tp")  # by all ranks together now, since later only some may run checkpointed calls
        return source.tensor
    for spelling in _SPELLINGS:
        size = getattr(source, f"get_{spelling}_parallel_world_size", None)
        rank = getattr(source, f"get_{spelling}_parallel_rank", None)
        if size is not None and rank is not None:
            return ModelAxis(int(size()), int(rank()), source, spelling)
    wanted = ", ".join(f"get_{spelling}_parallel_world_size" for spelling in _SPELLINGS)
    raise LayoutError(
        f"the mpu, a {type(source).__name__}, has none of {wanted} with the rank method beside it. "
        "Give it the methods of one of them, or give None for no model parallelism."
    )


SMALLEST = 1024
"""Elements under which a tensor stays as it is: a collective or a copy would cost more than it saves."""

_HOST = torch.device("cpu")


def is_activation(value: object) -> bool:
    """True for what is worth more than keeping it as it is: a plain floating-point tensor of some size."""
    return (
        type(value) is torch.Tensor  # parameters live anyway; other subclasses have memory of their own kind
        and value.is_floating_point()
        and value.layout == torch.strided
        and value.numel() >= SMALLEST
        and not is_expanded(value)
    )


@dataclass(frozen=True, slots=True)
class _KeptInput:
    flat: torch.Tensor | OffloadedTensor  # [numel], or [shard_numel] of it
    slot: BufferSlot[int] | None
    form: StridedForm


class InputKeeper:
    """Keeps inputs as the settings say. All ranks of the axis must be given the same values, as they compute them."""

    def __init__(self, settings: CheckpointingSettings, axis: ModelAxis | AxisGroup) -> None:
        self._axis = axis
        self._shards = axis.size if settings.partition_activations else 1
        # Where the accelerator is the CPU, inputs are in host memory already.
        self._to_host = settings.cpu_checkpointing and get_accelerator().device_name() != "cpu"
        self._offload = ActivationOffload(keep_last=settings.keep_last_count)
        self.arena: CheckpointBuffers | None = None
        if settings.contiguous_memory_optimization and settings.number_checkpoints:
            self.arena = CheckpointBuffers(settings.number_checkpoints, self._empty)

    @property
    def active(self) -> bool:
        """False if all inputs stay as they are."""
        return self._shards > 1 or self._to_host or self.arena is not None

    def hooks(self) -> AbstractContextManager[None]:
        """The context for one checkpointed call; see [Note: saved inputs]."""
        if not self.active:
            return nullcontext()
        positions, turn = itertools.count(), CallGroup()
        return saved_tensors_hooks(lambda tensor: self.keep(next(positions), tensor, turn), self.give_back)

    def keep(self, position: int, tensor: torch.Tensor, turn: CallGroup) -> KeptTensor | _KeptInput:
        """What waits for backward instead of the tensor at this position among the tensors of a call."""
        moves = self._to_host and on_device(tensor)
        if not is_activation(tensor) or not (self._shards > 1 or moves or self.arena is not None):
            return KeptTensor.of(tensor)
        with torch.no_grad():
            flat, form = flattened(tensor)
            size = -(-tensor.numel() // self._shards)  # the last shards are padded where it does not divide
            start = size * self._axis.rank if self._shards > 1 else 0
            part = flat[start : start + size]
            part = pad(part, (0, size - part.numel())) if part.numel() < size else part
            home = _HOST if moves else tensor.device
            slot = None if self.arena is None else self.arena.take(position, size, tensor.dtype, home)
            if moves:
                return _KeptInput(self._offload.park(part, tensor.shape, turn, slot), slot, form)
            kept = self._empty(size, tensor.dtype, home) if slot is None else slot.tensor
            kept.copy_(part)
        return _KeptInput(kept, slot, form)

    def give_back(self, kept: KeptTensor | _KeptInput) -> torch.Tensor:
        """The tensor that `keep` was given, by value."""
        if isinstance(kept, KeptTensor):
            return kept.get()
        with torch.no_grad():
            flat = self._offload.give_back(kept.flat) if isinstance(kept.flat, OffloadedTensor) else kept.flat
            if flat is kept.flat and self._shards == 1:
                flat = flat.clone()  # the slot may be taken by the next step while this tensor is still in use
            if self._shards > 1:
                whole = torch.empty(self._shards * flat.numel(), dtype=flat.dtype, device=flat.device)
                with comm.labelled("a saved input of a checkpointed call"):
                    comm.all_gather_into_tensor(whole, flat, group=self._axis.group)
                flat = whole[: kept.form.shape.numel()]
            return kept.form.restore(flat)

    def _empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device == _HOST and self._to_host:
            return get_accelerator().pin_empty(numel, dtype=dtype)
        return torch.empty(numel, dtype=dtype, device=device)


@dataclass(frozen=True, eq=False, slots=True)
class ConfigurationSource:
    """What one source said: some settings, and maybe the axis."""

    values: Mapping[str, Any] = field(default_factory=dict)
    axis: ModelAxis | AxisGroup | None = None


@dataclass(frozen=True, slots=True)
class CheckpointingPlan:
    """What holds for the next checkpointed call."""

    settings: CheckpointingSettings
    axis: ModelAxis | AxisGroup
    keeper: InputKeeper

    @classmethod
    def of(cls, sources: list[ConfigurationSource]) -> CheckpointingPlan:
        """Later sources take precedence, key by key."""
        values: dict[str, Any] = {}
        axis: ModelAxis | AxisGroup = ALONE
        for source in sources:
            values.update(source.values)
            axis = source.axis or axis
        settings = CheckpointingSettings.of(values)
        if settings.partition_activations and axis.size == 1:
            warn_once(
                f"{SECTION}.partition_activations shards nothing: the model-parallel group is this rank alone. Give "
                "an mpu with more ranks to deepspeed.checkpointing.configure or deepspeed.initialize."
            )
        return cls(settings, axis, InputKeeper(settings, axis))

    @property
    def is_plain(self) -> bool:
        """True if a checkpointed call is torch's, with nothing added."""
        settings = self.settings
        return not (self.keeper.active or settings.profile or settings.synchronize_checkpoint_boundary)


class Configuration:
    """Engines' config sections, overridden by `configure()`, overridden by single switches; made anew on each change.

    A change that does not fit together raises and leaves everything as it was.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything that engines and scripts said."""
        self._engines: list[ConfigurationSource] = []
        self._script: ConfigurationSource | None = None
        self._switches: dict[str, Any] = {}
        self._plan: CheckpointingPlan | None = CheckpointingPlan.of([])

    @property
    def plan(self) -> CheckpointingPlan:
        """What holds now."""
        if self._plan is None:
            self._change(self._engines, self._script, self._switches)
        assert self._plan is not None, "made above"
        return self._plan

    @property
    def is_explicit(self) -> bool:
        """True once a script called `configure()`."""
        return self._script is not None

    def say(self, said: ConfigurationSource) -> None:
        """A script's `configure()`; it replaces the script's earlier one, and switches for the keys that it gives."""
        switches = {key: value for key, value in self._switches.items() if key not in said.values}
        self._change(self._engines, said, switches)

    def switch(self, key: str, value: Any) -> None:
        """One setting from now on."""
        self._change(self._engines, self._script, {**self._switches, key: value})

    def add_engine(self, said: ConfigurationSource) -> None:
        """An engine's section; of several engines the last one takes precedence, key by key."""
        self._change([*self._engines, said], self._script, self._switches)

    def remove_engine(self, said: ConfigurationSource) -> None:
        """The engine is gone; removing it twice is harmless."""
        if said in self._engines:
            self._engines.remove(said)
            self._plan = None  # made at the next use: closing an engine must not fail

    def free_buffers(self) -> None:
        """Let go of the contiguous buffers; inputs that wait in them keep their part."""
        self._plan = None

    def _change(
        self, engines: list[ConfigurationSource], script: ConfigurationSource | None, switches: dict[str, Any]
    ) -> None:
        sources = [*engines, script or ConfigurationSource(), ConfigurationSource(switches)]
        self._plan = CheckpointingPlan.of(sources)
        self._engines, self._script, self._switches = engines, script, switches


CONFIGURATION = Configuration()


def configure_from(section: ActivationCheckpointingConfig, source: Any = None) -> Callable[[], None]:
    """Apply the config section of an engine, with its layout or its mpu; what a script configures comes first.

    A section that gives nothing changes nothing: another engine's stays. Returns what takes the section back.
    """
    said = ConfigurationSource(given_settings(section), None if source is None else model_axis(source))
    CONFIGURATION.add_engine(said)
    return partial(CONFIGURATION.remove_engine, said)
