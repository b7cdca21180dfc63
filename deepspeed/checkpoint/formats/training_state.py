"""`TrainingState`: everything that one rank gives to a checkpoint writer, as values; nothing here knows an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepspeed.fragments import DimSplit, FlatLayout


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
    known: Sequence[str] = ()
    """Kinds that other ranks have of this group: every rank's files list the same ones."""
    ep: int = 0
    """Over how many ranks its experts are spread, of which this rank's are listed here; 0: it has none."""

    @property
    def world(self) -> int:
        """Ranks over which the parameters are spread."""
        return 1 if self.layout is None else self.layout.world

    def interval(self, param: int) -> tuple[int, int]:
        """The [start, stop) of the parameter that this rank holds."""
        if self.layout is None:
            return 0, self.shapes[param].numel()
        return self.layout.interval(param, self.rank)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of tensors that some parameter has, on any rank, master first."""
        found = {kind for kind, tensors in self.tensors.items() if any(tensor is not None for tensor in tensors)}
        return tuple(sorted(found | set(self.known), key=lambda kind: (kind != "master", kind)))

    def without_state(self) -> list[str]:
        """The parameters of which elements lie here that the optimizer has no state of, although it has of others."""
        held = [index for index in range(len(self.names)) if self.interval(index)[0] < self.interval(index)[1]]
        columns = [self.tensors[kind] for kind in self.kinds if kind != "master" and kind in self.tensors]
        if self.kinds in ((), ("master",)):
            return []
        return [self.names[i] for i in held if not self.scalars[i] and all(column[i] is None for column in columns)]


@dataclass(frozen=True, slots=True)
class PipelineLayers:
    """The layers of a pipeline that have a file: their numbers, and with what their names in the model begin."""

    here: Mapping[int, str]
    """Those that this rank writes."""
    elsewhere: Mapping[int, str]
    """Those that another stage writes and that hold a tied weight of this one."""

    @property
    def known(self) -> dict[int, str]:
        """Both."""
        return {**self.elsewhere, **self.here}


@dataclass(frozen=True, slots=True)
class ExpertState:
    """The layers of experts of a model; names of experts have their numbers in the whole model."""

    layers: Mapping[str, int]
    """What the names of a layer's experts begin with → how many there are, in the order of the model."""
    data_first: bool
    """Neighbouring ranks have the same experts, not different ones."""
    part: int
    """Which part of the experts this rank has, of the largest number over which any are spread."""
    first: bool
    """Whether this rank is the first that has this part; of dealt experts those with the first data are, too."""
    writes: Mapping[str, bool]
    """Layer → whether this rank is the first of those that have the same experts of it."""
    slices: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Parameters in which experts lie one behind the other → which slice this rank has, of how many."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Layer → over how many ranks its experts are spread."""
    tensor: int = 1
    """Tensor-parallel ranks to which experts are dealt as to data-parallel ones; 1: they are not."""


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
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What the model's state dict holds besides tensors: `get_extra_state` of its modules."""
    dp_rank: int = 0
    dp_size: int = 1
    """The ranks that ZeRO shards over."""
    copy: int = 0
    copies: int = 1
    """Groups of such ranks that have equal shards, and which of them this rank is in: the first one writes them."""
    mp_rank: int = 0
    mp_size: int = 1
    pp_size: int = 1
    """Of the model-parallel ranks: how many stages they make; the rest are tensor slices."""
    layers: PipelineLayers | None = None
    """Of a pipeline."""
    splits: Mapping[str, DimSplit] = field(default_factory=dict)
    """How parameters are cut over tensor-parallel ranks, by name, under each of its names; others are whole."""
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
    pacing: Mapping[str, Any] = field(default_factory=dict)
    """What the engine's schedules by step have seen, where the number of steps does not say it."""
    rng: Mapping[str, Any] | None = None
    """This rank's random states."""
    own_buffers: Mapping[str, Tensor] | None = None
    """This rank's buffers where they are not those of the first rank, such as running statistics."""
    reductions: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """What this rank's reductions of gradients remember from step to step, by their names; empty if nothing."""
    client_state: Mapping[str, Any] = field(default_factory=dict)
    ds_config: Mapping[str, Any] = field(default_factory=dict)
    """The user's config without secrets."""
    experts: ExpertState | None = None
    """What of the model are experts; None: nothing."""
    shares: bool | None = None
    """This rank writes what all ranks have alike: the first one, with node-local storage one of each node."""

    @property
    def writes_shards(self) -> bool:
        """Whether this rank writes the shards that it has."""
        return self.copy == 0

    @property
    def number(self) -> int:
        """Of this rank among all that may write what they alone know."""
        return self.copy * self.dp_size + self.dp_rank

    @property
    def writes_shared(self) -> bool:
        """`shares`, with its None resolved."""
        return self.dp_rank == 0 if self.shares is None else self.shares
