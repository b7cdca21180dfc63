"""Experts in stacked parameters, of which ranks have slices: a slice in files is called as if it were an expert.

A parameter `experts.down_proj` of which n ranks have a slice each is `experts.deepspeed_experts.<0 … n − 1>.down_proj`
in DeepSpeed's files, so that these have a place for it at every stage. Whoever reads them sees the whole parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.formats.source import Part, Source, join
from deepspeed.checkpoint.formats.stages import Selection
from deepspeed.checkpoint.formats.training_state import TrainingState
from deepspeed.errors import CheckpointError

__all__ = ["JoinedSlices", "slice_name", "slices_in", "with_slices"]

_MOST = 2**20
_MARK = "deepspeed_experts"


def slice_name(name: str, number: int) -> str:
    """What a slice of a parameter is called."""
    before, _, last = name.rpartition(".")
    return f"{before}.{_MARK}.{number}.{last}"


def with_slices(state: TrainingState) -> TrainingState:
    """The same state with its slices called by their numbers."""
    slices = {} if state.experts is None else state.experts.slices
    if not slices:
        return state
    names = {name: slice_name(name, number) for name, (number, _) in slices.items()}

    def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
        return {names.get(name, name): value for name, value in values.items()}

    return replace(
        state,
        module=renamed(state.module),
        groups=[replace(group, names=[names.get(name, name) for name in group.names]) for group in state.groups],
        frozen=renamed(state.frozen),
        aliases={names.get(alias, alias): names.get(name, name) for alias, name in state.aliases.items()},
    )


def slices_in(value: Any, where: object) -> dict[str, int]:
    """Of a file: parameter → into how many slices it is cut; anything else is a CheckpointError about `where`."""
    found = value or {}
    for name, count in found.items():
        if not isinstance(name, str) or "." not in name or type(count) is not int or not 1 <= count < _MOST:
            raise CheckpointError(f"{where}: {name!r:.100} is said to lie in {count!r:.100} slices")
    return dict(found)


class JoinedSlices(Selection):
    """A source in which parameters that lie in slices are whole."""

    def __init__(self, source: Source, slices: Mapping[str, int]) -> None:
        """`slices`: parameter → into how many it is cut."""
        super().__init__(source, lambda _: True)
        self._slices = slices
        self._wholes = {slice_name(name, part): name for name, count in slices.items() for part in range(count)}
        for name, count in slices.items():
            shapes = {source.shapes.get(slice_name(name, part)) for part in range(count)}
            if len(shapes) != 1 or not all(shapes):
                raise CheckpointError(f"{name} lies in {count} slices, of which the checkpoint has {shapes}: not whole")

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Every parameter and buffer by name."""
        found: dict[str, torch.Size] = {}
        for name, shape in self._near.shapes.items():
            whole = self._wholes.get(name)
            if whole is None:
                found[name] = shape
            else:
                found[whole] = torch.Size((shape[0] * self._slices[whole], *shape[1:]))
        return found

    @property
    def aliases(self) -> Mapping[str, str]:
        """Tied name → the name in `shapes`."""
        return {self._wholes.get(a, a): self._wholes.get(name, name) for a, name in self._near.aliases.items()}

    @property
    def groups(self) -> Sequence[tuple[Sequence[str], Mapping[str, Any]]]:
        """The optimizer's groups."""
        joined = []
        for names, settings in self._near.groups:
            joined.append((list(dict.fromkeys(self._wholes.get(name, name) for name in names)), settings))
        return joined

    def kinds(self, name: str) -> tuple[str, ...]:
        """What can be read of a parameter."""
        return self._near.kinds(self._first(name))

    def dtype(self, name: str) -> torch.dtype | None:
        """What the model computed with."""
        return self._near.dtype(self._first(name))

    def scalars(self, name: str) -> Mapping[str, Any]:
        """The optimizer's state of a parameter that has no elements of its own, which slices have alike."""
        return self._near.scalars(self._first(name))

    def find(self, name: str, kind: str, start: int = 0, stop: int | None = None) -> list[Part]:
        """Where the flat elements [start, stop) of a tensor are."""
        name = self.aliases.get(name, name)
        if name not in self._slices:
            return self._near.find(name, kind, start, stop)
        numel = self._near.shapes[self._first(name)].numel()
        stop = numel * self._slices[name] if stop is None else stop
        parts: list[Part] = []
        for part in range(start // max(numel, 1), -(-stop // max(numel, 1))):
            low, high = max(start - part * numel, 0), min(stop - part * numel, numel)
            parts += self._near.find(slice_name(name, part), kind, low, high)
        return parts

    def read(self, name: str, kind: str, start: int = 0, stop: int | None = None) -> Tensor:
        """The flat elements [start, stop) of a tensor."""
        return join(self.find(name, kind, start, stop))

    def _first(self, name: str) -> str:
        name = self.aliases.get(name, name)
        return slice_name(name, 0) if name in self._slices else name
