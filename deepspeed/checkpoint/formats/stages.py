"""A pipeline's checkpoint as one `Source`: each stage has files of its own, and each name lies with one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.formats.source import Part, Small, Source

__all__ = ["Selection", "Stages"]


class Stages:
    """Sources of the stages together; of what several have, weights that are tied, the first one's counts."""

    def __init__(self, sources: Sequence[Source], near: int = 0) -> None:
        """`near`: the stage that this rank asks for what all of them say."""
        self.sources = sources
        self._near = sources[near] if near < len(sources) else sources[0]
        self._home: dict[str, Source] = {}
        for source in sources:
            for name in source.shapes:
                known = self._home.get(name)
                if known is None or (len(source.kinds(name)) > len(known.kinds(name))):
                    self._home[name] = source

    @property
    def count(self) -> int:
        """Stages."""
        return len(self.sources)

    @property
    def format(self) -> str:
        """A few words on what this is."""
        return f"{self._near.format}, {len(self.sources)} pipeline stages"

    @property
    def stage(self) -> int:
        """ZeRO's stage when it was written."""
        return self._near.stage

    @property
    def world(self) -> int:
        """Ranks over which ZeRO sharded a stage."""
        return self._near.world

    @property
    def files(self) -> Sequence[str]:
        """Every file that belongs to it."""
        return self._near.files

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Every parameter and buffer by name."""
        return {name: source.shapes[name] for name, source in self._home.items()}

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """The buffers, whole."""
        return {name: tensor for source in self.sources for name, tensor in source.buffers.items()}

    @property
    def aliases(self) -> Mapping[str, str]:
        """Tied name → the name in `shapes`."""
        return {alias: name for source in self.sources for alias, name in source.aliases.items()}

    @property
    def groups(self) -> Sequence[tuple[Sequence[str], Mapping[str, Any]]]:
        """The optimizer's groups, of every stage."""
        return [group for source in self.sources for group in source.groups]

    @property
    def small(self) -> Small:
        """What is not a tensor."""
        return self._near.small

    def kinds(self, name: str) -> tuple[str, ...]:
        """What can be read of a parameter."""
        return self._of(name).kinds(name)

    def dtype(self, name: str) -> torch.dtype | None:
        """What the model computed with."""
        return self._of(name).dtype(name)

    def find(self, name: str, kind: str, start: int = 0, stop: int | None = None) -> list[Part]:
        """Where the flat elements [start, stop) of a tensor are."""
        return self._of(name).find(name, kind, start, stop)

    def read(self, name: str, kind: str, start: int = 0, stop: int | None = None) -> Tensor:
        """The flat elements [start, stop) of a tensor."""
        return self._of(name).read(name, kind, start, stop)

    def scalars(self, name: str) -> Mapping[str, Any]:
        """The optimizer's state of a parameter that has no elements of its own."""
        return self._of(name).scalars(name)

    def rank_state(self, rank: int) -> Mapping[str, Any]:
        """`rng` and `data` of a rank that wrote it, of this rank's stage."""
        return self._near.rank_state(rank)

    def _of(self, name: str) -> Source:
        owner = self.aliases.get(name, name)
        return self._home.get(name) or self._home.get(owner) or self._near


class Selection(Stages):
    """A source of which a rank of a pipeline sees what its own layers need."""

    def __init__(self, source: Source, holds: Callable[[str], bool]) -> None:
        super().__init__([source])
        self._holds = holds

    @property
    def format(self) -> str:
        """A few words on what this is."""
        return self._near.format

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Every parameter and buffer by name that lies here."""
        return {name: shape for name, shape in self._near.shapes.items() if self._holds(name)}

    @property
    def aliases(self) -> Mapping[str, str]:
        """Tied name → the name in `shapes`."""
        return {alias: name for alias, name in self._near.aliases.items() if self._holds(alias)}

    @property
    def groups(self) -> Sequence[tuple[Sequence[str], Mapping[str, Any]]]:
        """The optimizer's groups, with what of them lies here."""
        kept = [([name for name in names if self._holds(name)], settings) for names, settings in self._near.groups]
        return [(names, settings) for names, settings in kept if names]
