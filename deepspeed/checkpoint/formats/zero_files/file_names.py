"""The names of DeepSpeed's checkpoint files, made and recognised."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_SHARDED_MODEL = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_RANK = re.compile(r"dp_rank_(\d+)_mp_rank_(\d+)_rank_states\.pt")
_LAYER = re.compile(r"layer_(\d+)-.*model_states\.pt")
_EXPERT = re.compile(r"(?:layer_(\d+)_)?expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_EXPERTS_OPTIMIZER = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


def model_file(stage: int, dp_rank: int, mp_rank: int) -> str:
    """The model's file: one per rank at stage 3, one for all data-parallel ranks below."""
    shard = f"zero_pp_rank_{dp_rank}_" if stage == 3 else ""
    return f"{shard}mp_rank_{mp_rank:02d}_model_states.pt"


def optimizer_file(precision: str, dp_rank: int, mp_rank: int) -> str:
    """The optimizer's file of a rank at stages 1 to 3."""
    prefix = "bf16_" if precision == "bf16" else ""
    return f"{prefix}zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt"


def rank_file(dp_rank: int, mp_rank: int) -> str:
    """Ours: what a rank alone knows at stage 0, where DeepSpeed has no file per rank."""
    return f"dp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_rank_states.pt"


def layer_file(layer: int, tp_rank: int | None = None) -> str:
    """A pipeline's layer."""
    part = "" if tp_rank is None else f"-model_{tp_rank:02d}"
    return f"layer_{layer:02d}{part}-model_states.pt"


def expert_file(layer: int, expert: int, mp_rank: int) -> str:
    """An expert of a mixture-of-experts layer."""
    return f"layer_{layer}_expert_{expert}_mp_rank_{mp_rank:02d}_model_states.pt"


def experts_optimizer_file(part: int, mp_rank: int) -> str:
    """Stage 0: the optimizer's state on a rank that has a certain part of the experts."""
    return f"expp_rank_{part}_mp_rank_{mp_rank:02d}_optim_states.pt"


@dataclass(slots=True)
class CheckpointFiles:
    """The files of a checkpoint directory by what they are; keys are (data-parallel rank, model-parallel rank)."""

    models: dict[int, str] = field(default_factory=dict)
    sharded_models: dict[tuple[int, int], str] = field(default_factory=dict)
    optimizers: dict[tuple[int, int], str] = field(default_factory=dict)
    ranks: dict[tuple[int, int], str] = field(default_factory=dict)
    layers: list[str] = field(default_factory=list)
    experts: dict[tuple[int, int, int], str] = field(default_factory=dict)
    """By (layer, expert, model-parallel rank)."""
    expert_optimizers: dict[tuple[int, int], str] = field(default_factory=dict)
    """Stage 0: by (part of the experts, model-parallel rank)."""

    @property
    def model_ranks(self) -> list[int]:
        """The model-parallel ranks that wrote model files."""
        return sorted({*self.models, *(mp for _, mp in self.sharded_models)}) or [0]

    @property
    def files(self) -> tuple[str, ...]:
        """All of them, in a stable order."""
        kinds: tuple[dict[Any, str], ...] = (
            self.models,
            self.sharded_models,
            self.optimizers,
            self.ranks,
            self.experts,
            self.expert_optimizers,
        )
        return (*(kind[key] for kind in kinds for key in sorted(kind)), *self.layers)


def sort_files(names: Iterable[str]) -> CheckpointFiles:
    """Recognise files by their names; others are left out."""
    found = CheckpointFiles()
    for name in sorted(names):
        if match := _MODEL.fullmatch(name):
            found.models[int(match[1])] = name
        elif match := _SHARDED_MODEL.fullmatch(name):
            found.sharded_models[int(match[1]), int(match[2])] = name
        elif match := _OPTIMIZER.fullmatch(name):
            found.optimizers[int(match[1]), int(match[2])] = name
        elif match := _RANK.fullmatch(name):
            found.ranks[int(match[1]), int(match[2])] = name
        elif _LAYER.fullmatch(name):
            found.layers.append(name)
        elif match := _EXPERT.fullmatch(name):
            found.experts[int(match[1] or 0), int(match[2]), int(match[3])] = name
        elif match := _EXPERTS_OPTIMIZER.fullmatch(name):
            found.expert_optimizers[int(match[1]), int(match[2])] = name
    return found
