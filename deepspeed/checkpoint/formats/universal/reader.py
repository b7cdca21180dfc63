"""A universal checkpoint as a `Source`: one small file per parameter and kind."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.formats.checked_files import Opened, Opener
from deepspeed.checkpoint.formats.guard import guarded
from deepspeed.checkpoint.formats.source import IntervalIndex, Small, Source, StoredInterval, StoredPart
from deepspeed.checkpoint.formats.zero_files.class_stand_ins import scaler_attributes
from deepspeed.checkpoint.formats.zero_files.reader import DeepSpeedSource
from deepspeed.errors import CheckpointError


@guarded
class UniversalSource(Source):
    """A directory with `zero/<name>/<kind>.pt` and the model files of the run, which hold buffers and counters."""

    def __init__(self, directory: Path, mp_rank: int = 0, *, opener: Opener | None = None) -> None:
        self._directory = directory
        self._opener = opener or Opener(directory)
        self._base = DeepSpeedSource(directory, mp_rank, opener=self._opener)
        self.world = self._base.world
        self.buffers = self._base.buffers
        self.stage = 3 if any(name.startswith("zero_pp_rank") for name in self._base.files) else 2  # of the model files
        self.format = f"universal, from DeepSpeed {self._base.small.version}"
        self._pieces = IntervalIndex(str(directory), dict(self._base.aliases), dict(self._base.shapes))
        self.shapes, self.aliases = self._pieces.shapes, self._pieces.aliases
        self._steps: dict[str, Path] = {}
        # Then the model files have slices, and what lies here was put together of them.
        self._sliced = sum(name.startswith("mp_rank_") for name in self._base.files) > 1
        for folder in sorted(path for path in (directory / "zero").iterdir() if path.is_dir()):
            if folder.name not in self._base.buffers and folder.name not in self._pieces.aliases:
                self._enter(folder)

    @functools.cached_property
    def files(self) -> Sequence[str]:
        inside = sorted(str(path.relative_to(self._directory)) for path in (self._directory / "zero").rglob("*.pt"))
        return (*self._base.files, *inside)

    @functools.cached_property
    def groups(self) -> Sequence[tuple[Sequence[str], Mapping[str, Any]]]:
        shapes = self._base.model_entries.get("param_shapes") or []
        inner = self._state.get("optimizer_state_dict")
        found = inner["param_groups"] if isinstance(inner, Mapping) else self._state.get("param_groups") or []
        by_parameter = self.stage == 3 and all("params" in group for group in found)
        members = [group["params"] if by_parameter else [place] for place, group in enumerate(found)]
        if sorted(flat for flats in members for flat in flats) != list(range(len(shapes))):
            return []
        return [
            ([name for flat in flats for name in shapes[flat]], {k: v for k, v in group.items() if k != "params"})
            for flats, group in zip(members, found, strict=True)
        ]

    @functools.cached_property
    def small(self) -> Small:
        small, state = self._base.small, self._state
        scale = small.loss_scale or state.get("loss_scale") or scaler_attributes(state.get("loss_scaler"))
        clip = state.get("clip_grad") if small.clip is None else small.clip
        return dataclasses.replace(small, loss_scale=scale, clip=clip)

    def kinds(self, name: str) -> tuple[str, ...]:
        return self._pieces.kinds(name) or self._base.kinds(name)

    def dtype(self, name: str) -> torch.dtype | None:
        return self._base.dtype(name)

    def find(self, name: str, kind: str, start: int = 0, stop: int | None = None) -> list[StoredPart]:
        if self._pieces.owner(name) not in self._pieces.index:
            return self._base.find(name, kind, start, stop)
        return self._pieces.find(name, kind, start, stop)

    def scalars(self, name: str) -> Mapping[str, Any]:
        owner = self._pieces.owner(name)
        if owner in self._steps:
            return {"step": self._object(self._steps[owner])}
        states = (self._state.get("optimizer_state_dict") or {}).get("state") or {}
        if "exp_avg" not in self.kinds(owner) or "step" not in states.get(0, {}):
            return {}
        return {"step": states[0]["step"]}

    @functools.cached_property
    def _state(self) -> Mapping[str, Any]:
        path = self._directory / "zero" / "optimizer_state.pt"
        found: Mapping[str, Any] = self._object(path) if path.exists() else {}
        return found

    def _enter(self, folder: Path) -> None:
        name = folder.name
        for path in sorted(folder.glob("*.pt"), key=lambda path: (path.stem != "fp32", path.name)):
            kind = "master" if path.stem == "fp32" else path.stem
            if kind == "step":
                self._steps[name] = path
                continue
            if name not in self._pieces.shapes or (self._sliced and kind == "master"):
                self._pieces.shapes[name] = self._tensor(path)[0].shape
            numel = self._pieces.shapes[name].numel()
            load = functools.partial(self._tensor, path)
            self._pieces.add(name, kind, StoredInterval((0, numel), load, 0, str(path)))

    def _object(self, path: Path) -> Any:
        """A small file, checked as a whole."""
        opened = self._opener.torch(str(path.relative_to(self._directory)))
        return opened.checked(opened.state)

    def _tensor(self, path: Path) -> tuple[Tensor, Opened]:
        opened = self._opener.torch(str(path.relative_to(self._directory)))
        found = opened.state
        tensor = found.get("param") if isinstance(found, Mapping) else found
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{path} holds {type(found).__name__}, expected a tensor or {{'param': tensor}}")
        return tensor, opened
