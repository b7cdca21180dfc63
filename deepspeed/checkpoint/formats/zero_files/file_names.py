"""The names of DeepSpeed's checkpoint files, made and recognised."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["Found", "expert_file", "layer_file", "model_file", "optimizer_file", "rank_file", "sort_files"]

_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_SHARDED_MODEL = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_RANK = re.compile(r"dp_rank_(\d+)_mp_rank_(\d+)_rank_states\.pt")
_LAYER = re.compile(r"layer_(\d+)-.*model_states\.pt")
_EXPERT = re.compile(r"(?:layer_(\d+)_)?expert_(\d+)_mp_rank_(\d+)_model_states\.pt|expp_rank_.*_optim_states\.pt")


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


@dataclass(slots=True)
class Found:
    """The files of a checkpoint directory by what they are; keys are (data-parallel rank, model-parallel rank)."""

    models: dict[int, str] = field(default_factory=dict)
    sharded_models: dict[tuple[int, int], str] = field(default_factory=dict)
    optimizers: dict[tuple[int, int], str] = field(default_factory=dict)
    ranks: dict[tuple[int, int], str] = field(default_factory=dict)
    layers: list[str] = field(default_factory=list)
    experts: list[str] = field(default_factory=list)

    @property
    def files(self) -> tuple[str, ...]:
        """All of them, in a stable order."""
        groups = (self.models, self.sharded_models, self.optimizers, self.ranks)
        listed = [group[key] for group in groups for key in sorted(group)]  # type: ignore[index]
        return (*listed, *self.layers, *self.experts)


def sort_files(names: Iterable[str]) -> Found:
    """Recognise files by their names; others are left out."""
    found = Found()
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
        elif _EXPERT.fullmatch(name):
            found.experts.append(name)
    return found
