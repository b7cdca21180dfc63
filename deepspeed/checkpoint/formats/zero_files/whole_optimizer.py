"""The optimizer's state of stage 0, which DeepSpeed keeps whole and without names, in one of three shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.formats.checked_files import Opened
from deepspeed.checkpoint.formats.source import IntervalIndex
from deepspeed.errors import CheckpointError
from deepspeed.fragments import ContiguousLayout

_FILE = "the 'optimizer' entry of the model file"


class WholeOptimizer:
    """The `optimizer` entry of a model file.

    Without `order` (the names of each parameter group) nothing in it can be told apart and nothing is offered; the same
    holds for a group for which it has None.
    """

    def __init__(
        self, model: Opened, order: Sequence[Sequence[str] | None] | None, pieces: IntervalIndex, *, ours: bool
    ) -> None:
        entries, self._model = model.state["optimizer"], model
        inner = entries.get("optimizer_state_dict", entries)
        self._entries, self._states = entries, inner["state"]
        self._groups = inner["param_groups"]
        self._single: Mapping[str, Any] = entries.get("parameter_scalars") or {}
        self._ours = ours
        self._shapes = pieces.shapes
        self._state_of: dict[str, tuple[int, int]] = {}
        self._order = [None if names is None else [pieces.owner(name) for name in names] for names in order or ()]
        if self._order:
            self._fill(pieces)

    @property
    def groups(self) -> list[tuple[Sequence[str], Mapping[str, Any]]]:
        """The optimizer's groups; empty where unknown."""
        plain = [{key: value for key, value in group.items() if key != "params"} for group in self._groups]
        both = zip(self._order, plain, strict=True) if self._order else ()
        return [(names, group) for names, group in both if names is not None]

    def scalars(self, name: str) -> Mapping[str, Any]:
        """The state of a parameter that has no elements of its own."""
        if name in self._single:
            return self._model.checked(self._single[name])
        if name not in self._state_of:
            return {}
        group, number = self._state_of[name]
        state = self._states.get(number, {})
        found = {key: value for key, value in state.items() if not self._is_elementwise(key, value, self._shapes[name])}
        if "step" in found and not self._ours and "bias_correction" in self._groups[group]:
            # DeepSpeed's FusedAdam counts in the last parameter of a group only.
            found["step"] = max(self._states[other]["step"] for other in self._groups[group]["params"])
        return self._model.checked(found)

    def _fill(self, pieces: IntervalIndex) -> None:
        if len(self._order) != len(self._groups):
            raise CheckpointError(
                f"{pieces.directory}: the optimizer has {len(self._groups)} parameter groups in the file, "
                f"{len(self._order)} here; DeepSpeed stores no names at stage 0, so they must be the same groups"
            )
        flats = self._entries.get("fp32_groups_flat")
        masters = self._entries.get("fp32_groups")
        for place, names in enumerate(self._order):
            if names is None:
                continue
            missing = [name for name in names if name not in pieces.shapes]
            if missing:
                raise CheckpointError(f"{pieces.directory}: no parameter {missing[0]!r} in the model file")
            if flats is not None:
                self._fill_flat(place, names, flats[place], pieces)
                continue
            numbers = self._groups[place]["params"]
            if len(numbers) != len(names):
                raise CheckpointError(
                    f"{pieces.directory}: group {place} has {len(numbers)} parameters in the file, {len(names)} here"
                )
            for index, (name, number) in enumerate(zip(names, numbers, strict=True)):
                self._state_of[name] = place, number
                state = self._states.get(number, {})
                shape = pieces.shapes[name]
                own = {key: value for key, value in state.items() if self._is_elementwise(key, value, shape)}
                if masters is not None:
                    own["master"] = masters[place][index]
                for kind, tensor in own.items():
                    self._add(pieces, name, kind, tensor, 0, whole=True)

    def _is_elementwise(self, key: str, value: Any, shape: torch.Size) -> bool:
        """Whether a state has one element per element; in files of ours, whose names are known, the shape tells."""
        return _has_elements(key, value, shape) and not (self._ours and value.shape != shape)

    def _fill_flat(self, place: int, names: Sequence[str], master: Tensor, pieces: IntervalIndex) -> None:
        layout = ContiguousLayout(tuple(pieces.shapes[name].numel() for name in names), 1, align=1)
        if layout.filled != master.numel():
            raise CheckpointError(
                f"{pieces.directory}: group {place} has {master.numel()} elements in the file, the parameters "
                f"{', '.join(names[:3])}, ... have {layout.filled}: they must be the same groups in the same order"
            )
        number = self._groups[place]["params"][0]
        state = self._states.get(number, {})
        for index, name in enumerate(names):
            self._state_of[name] = place, number
            stateless = name in self._single and not self._single[name]
            own = {} if stateless else {key: value for key, value in state.items() if _has_elements(key, value)}
            for kind, tensor in {"master": master, **own}.items():
                self._add(pieces, name, kind, tensor, layout.starts[index], whole=False)

    def _add(self, pieces: IntervalIndex, name: str, kind: str, tensor: Tensor, offset: int, *, whole: bool) -> None:
        numel = pieces.shapes[name].numel()
        if whole and tensor.numel() != numel:
            raise CheckpointError(
                f"{pieces.directory}: {kind} has {tensor.numel()} elements where {name} has {numel} "
                f"({tuple(pieces.shapes[name])}): the optimizer's groups are not those of the file"
            )
        pieces.hold(name, kind, tensor, self._model, _FILE, offset)


def _has_elements(key: str, value: Any, shape: torch.Size | None = None) -> bool:
    scalar = shape is not None and not shape and key != "step"  # a parameter without dims has such moments
    return isinstance(value, torch.Tensor) and (value.ndim > 0 or scalar)
