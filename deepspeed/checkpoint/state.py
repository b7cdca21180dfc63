"""`TrainingState`: everything that one rank gives to a checkpoint writer, as values; nothing here knows an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepspeed.fragments import FlatLayout

__all__ = ["Counters", "GroupState", "TrainingState"]


@dataclass(frozen=True, slots=True)
class Counters:
    """How far training went."""

    global_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0
    micro_steps: int = 0


@dataclass(frozen=True, slots=True)
class GroupState:
    """What this rank holds of one parameter group of the optimizer."""

    names: Sequence[str]
    """The trained parameters, in the order of the layout."""
    shapes: Sequence[torch.Size]
    """Of the whole parameters."""
    tensors: Mapping[str, Sequence[Tensor | None]]
    """kind ("master" or an optimizer state) → one tensor per parameter: this rank's interval of it; None if absent."""
    scalars: Sequence[Mapping[str, Any]]
    """Per parameter the state that has no elements of its own, such as `step`; empty if it has no state yet."""
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    layout: FlatLayout | None = None
    """How the parameters are spread over ranks; None: every rank holds them whole."""
    rank: int = 0
    """This rank's number in the layout."""

    def interval(self, param: int) -> tuple[int, int]:
        """The [start, stop) of the parameter that this rank holds."""
        if self.layout is None:
            return 0, self.shapes[param].numel()
        return self.layout.interval(param, self.rank)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of tensors that some parameter has, master first."""
        found = [kind for kind, tensors in self.tensors.items() if any(tensor is not None for tensor in tensors)]
        return tuple(sorted(found, key=lambda kind: kind != "master"))


@dataclass(frozen=True, slots=True)
class TrainingState:
    """What one rank gives to a writer."""

    stage: int
    """Of ZeRO; it decides the files of DeepSpeed's layout."""
    precision: str
    """"fp32", "bf16" or "fp16"."""
    module: Mapping[str, Tensor]
    """The model's state dict, in its order, tied names and buffers included.

    At stage 3 a parameter's value is this rank's `Striped` part of it, one-dimensional.
    """
    groups: Sequence[GroupState] = ()
    buffers: Sequence[str] = ()
    """Which names of `module` are buffers: they are whole at every stage."""
    frozen: Mapping[str, torch.Size] = field(default_factory=dict)
    """The parameters of `module` that no group trains, with their whole shapes."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Tied name → the name under which the parameter is kept."""
    dp_rank: int = 0
    dp_size: int = 1
    """The ranks that ZeRO shards over."""
    mp_rank: int = 0
    mp_size: int = 1
    counters: Counters = field(default_factory=Counters)
    loss_scale: Mapping[str, Any] | None = None
    """The attributes of the loss scaler; None where the loss is not scaled."""
    overflow: bool = False
    clip: float | None = None
    """The largest gradient norm; DeepSpeed takes it over from the file, so None leaves it out."""
    sub_group_size: int = 1_000_000_000
    """Stage 3: elements after which DeepSpeed's layout begins another flat tensor."""
    flat_masters: bool = True
    """Stage 0 in 16 bit: DeepSpeed keeps one flat tensor per group with its FusedAdam, separate ones otherwise."""
    lr_scheduler: Mapping[str, Any] | None = None
    data: Mapping[str, Any] | None = None
    """This rank's position in its data."""
    rng: Mapping[str, Any] | None = None
    """This rank's random states."""
    client_state: Mapping[str, Any] = field(default_factory=dict)
    ds_config: Mapping[str, Any] = field(default_factory=dict)
    """The user's config without secrets."""
