"""Experts in DeepSpeed's files: their numbers in names, the ranks that hold them, and a file for each of them.

A rank numbers the experts that it holds from 0, and so do the files that list a rank's parameters; a model has them
numbered through, as the files of experts do. `Grid` tells which rank holds which.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from deepspeed.checkpoint.formats.bounds import rank_count
from deepspeed.errors import CheckpointError

__all__ = ["ExpertLayers", "Grid", "expert_entries", "layer_of", "layers_of", "number_of", "renumbered", "sizes_of"]

T = TypeVar("T")

_NAME = re.compile(r"(.*\bdeepspeed_experts\.)(\d{1,9})(\..*)")
_GROUP = re.compile(r"ep_size_(\d{1,6})")


def layer_of(name: str) -> str | None:
    """What all experts of a layer begin with; None for a name that is none of an expert."""
    found = _NAME.fullmatch(name)
    return None if found is None else found[1]


def number_of(name: str) -> int:
    """The expert's number in a name of one."""
    found = _NAME.fullmatch(name)
    assert found is not None, "only names of experts have one"
    return int(found[2])


def renumbered(name: str, by: int) -> str:
    """The same parameter of another expert; names of other parameters stay."""
    found = _NAME.fullmatch(name)
    return name if found is None or not by else f"{found[1]}{int(found[2]) + by}{found[3]}"


@dataclass(frozen=True)
class Grid:
    """`ep` ranks share the experts of a layer, and `edp` ranks hold each."""

    ep: int
    edp: int
    data_first: bool = False

    def rank(self, part: int, copy: int) -> int:
        """The data-parallel rank that has a certain part of the experts, and is a certain one of those that have."""
        return part * self.edp + copy if self.data_first else copy * self.ep + part

    def copy_of(self, rank: int) -> int:
        """Which of those that have the same experts a data-parallel rank is."""
        return rank % self.edp if self.data_first else rank // self.ep

    def part_of(self, rank: int) -> int:
        """The part of the experts that a data-parallel rank has."""
        return rank // self.edp if self.data_first else rank % self.ep


@dataclass(frozen=True)
class ExpertLayers:
    """The layers of experts in a checkpoint, and how they were spread."""

    experts: Mapping[str, int]
    """Beginning of names → experts, in the order of the model."""
    world: int
    """Data-parallel ranks."""
    data_first: bool = False
    tensor: int = 1
    """Tensor-parallel ranks to which experts are dealt as to data-parallel ones; 1: they are not."""

    @property
    def ranks(self) -> int:
        """Over how many ranks experts may be spread: tensor-parallel ones are the neighbours among them."""
        return self.world * self.tensor

    def grid(self, ep: int) -> Grid:
        """The ranks of experts that are spread over `ep` ranks; 0 or 1: all ranks have all."""
        ep = max(ep, 1)
        if self.ranks % ep:
            raise CheckpointError(f"experts spread over {ep} ranks do not fit the {self.ranks} ranks that wrote them")
        return Grid(ep, self.ranks // ep, self.data_first)

    def copies(self, ep: int) -> int:
        """How many ranks have the same elements of experts that are spread over `ep` ranks; 0: of what is dense."""
        return self.grid(ep).edp if ep else self.world

    def shift(self, name: str, ep: int, part: int) -> int:
        """What turns the number of an expert, as some rank lists it, into that of the same place in a part."""
        layer = layer_of(name)
        if layer is None:
            return 0
        if not self.experts.get(layer) or self.experts[layer] % max(ep, 1):
            raise CheckpointError(
                f"{name}: a layer of {self.experts.get(layer)} experts cannot be spread over {ep} ranks"
            )
        local = self.experts[layer] // max(ep, 1)
        return (part - number_of(name) // local) * local

    def names(self, listed: Iterable[str], ep: int, part: int) -> list[str]:
        """The names in the model of what a rank that has `part` lists, of what any rank does."""
        return [renumbered(name, self.shift(name, ep, part)) for name in listed]

    def everywhere(self, values: Mapping[str, T]) -> dict[str, T]:
        """What is said of the experts that a rank lists, of all of them: they are alike."""
        found = dict(values)
        for name, value in values.items():
            layer = layer_of(name)
            for number in range(self.experts.get(layer, 0) if layer else 0):
                found.setdefault(renumbered(name, number - number_of(name)), value)
        return found

    def expanded(self, order: Sequence[Sequence[str]], sizes: Sequence[int]) -> list[list[str]]:
        """Names as the first rank that wrote lists them, of those that a rank of any other layout lists."""
        result = []
        for names, ep in zip(order, sizes, strict=True):
            listed: list[str] = []
            seen: set[str] = set()
            for name in names:
                layer = layer_of(name)
                if layer is None:
                    listed.append(name)
                elif layer not in seen:
                    seen.add(layer)
                    first = number_of(name)
                    own = [each for each in names if layer_of(each) == layer and number_of(each) == first]
                    local = self.experts.get(layer, 0) // max(ep, 1)
                    listed += [renumbered(each, number - first) for number in range(local) for each in own]
            result.append(listed)
        return result


def sizes_of(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    """Over how many ranks the experts of each of the optimizer's groups were spread, by its name; 0: it has none."""
    found = [_GROUP.fullmatch(str(group.get("name", ""))) if group.get("moe") else None for group in groups]
    return [0 if each is None else int(each[1]) for each in found]


def expert_entries(module: Mapping[str, Tensor], layers: Sequence[str]) -> dict[tuple[int, int], dict[str, Tensor]]:
    """(number of the layer, number of the expert) → what a file of that expert holds."""
    places = {layer: place for place, layer in enumerate(layers)}
    result: dict[tuple[int, int], dict[str, Tensor]] = {}
    for name, tensor in module.items():
        layer = layer_of(name)
        if layer is not None and layer in places:
            result.setdefault((places[layer], number_of(name)), {})[name] = tensor
    return result


def layers_of(model: Mapping[str, Any], extra: Mapping[str, Any], names: Iterable[str], where: object) -> ExpertLayers:
    """The layers that a model's file tells of; `names` are those in the files of experts."""
    world = rank_count(model.get("dp_world_size", 1), where)
    known = extra.get("experts")
    if known is not None:
        tensor = rank_count(known.get("tensor", 1), where)
        return ExpertLayers(dict(known["layers"]), world, bool(known["data_first"]), tensor)
    found: dict[str, int] = {}
    for name in names:
        layer = layer_of(name)
        if layer is not None:
            found[layer] = max(found.get(layer, 0), number_of(name) + 1)
    config = model.get("ds_config") or {}
    return ExpertLayers(found, world, bool(config.get("use_data_before_expert_parallelism", False)))
