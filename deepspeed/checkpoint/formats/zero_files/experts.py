"""Experts in DeepSpeed's files: their numbers in names, the ranks that hold them, a file for each, their optimizers.

A rank numbers the experts that it holds from 0, and so do the files that list a rank's parameters; a model has them
numbered through, as the files of experts do. `ExpertGrid` tells which rank holds which.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from deepspeed.checkpoint.formats.adapters import slices_in
from deepspeed.checkpoint.formats.checked_files import Opened, Opener
from deepspeed.checkpoint.formats.guard import rank_count, shapes_of
from deepspeed.checkpoint.formats.source import IntervalIndex
from deepspeed.checkpoint.formats.zero_files.file_names import CheckpointFiles
from deepspeed.checkpoint.formats.zero_files.whole_optimizer import WholeOptimizer
from deepspeed.errors import CheckpointError

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
class ExpertGrid:
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
    sizes: Sequence[int] | None = None
    """Over how many ranks those of each of the optimizer's groups were spread; None: its names tell."""

    def of_groups(self, groups: Sequence[Mapping[str, Any]]) -> list[int]:
        """Over how many ranks the experts of each of the optimizer's groups were spread; 0: it has none."""
        named = [_GROUP.fullmatch(str(group.get("name", ""))) if group.get("moe") else None for group in groups]
        found = [0 if each is None else int(each[1]) for each in named] if self.sizes is None else list(self.sizes)
        if len(found) != len(groups):
            raise CheckpointError(
                f"the model file tells of {len(found)} parameter groups, the optimizer's of {len(groups)}"
            )
        return found

    @property
    def ranks(self) -> int:
        """Over how many ranks experts may be spread: tensor-parallel ones are the neighbours among them."""
        return self.world * self.tensor

    def grid(self, ep: int) -> ExpertGrid:
        """The ranks of experts that are spread over `ep` ranks; 0 or 1: all ranks have all."""
        ep = max(ep, 1)
        if self.ranks % ep:
            raise CheckpointError(f"experts spread over {ep} ranks do not fit the {self.ranks} ranks that wrote them")
        return ExpertGrid(ep, self.ranks // ep, self.data_first)

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


def _layers_of(model: Mapping[str, Any], extra: Mapping[str, Any], names: Iterable[str], where: object) -> ExpertLayers:
    """The layers that a model's file tells of; `names` are those in the files of experts."""
    world = rank_count(model.get("dp_world_size", 1), where)
    known = extra.get("experts")
    if known is not None:
        tensor = rank_count(known.get("tensor", 1), where)
        return ExpertLayers(dict(known["layers"]), world, bool(known["data_first"]), tensor, known.get("sizes"))
    found: dict[str, int] = {}
    for name in names:
        layer = layer_of(name)
        if layer is not None:
            found[layer] = max(found.get(layer, 0), number_of(name) + 1)
    config = model.get("ds_config") or {}
    return ExpertLayers(found, world, bool(config.get("use_data_before_expert_parallelism", False)))


class ExpertReader:
    """The experts in the files of one model-parallel rank."""

    def __init__(
        self, found: CheckpointFiles, opener: Opener, mp_rank: int, model: Mapping[str, Any], extra: Mapping[str, Any]
    ) -> None:
        """`model`: the entries of the model's file; `extra`: those of them that DeepSpeed does not have."""
        self._found, self._opener, self._mp_rank = found, opener, mp_rank
        self._extra = extra
        told = extra.get("experts") or {}
        where = opener.directory
        self.slices = slices_in(told.get("slices"), where)
        """Parameters that lie in slices → in how many."""
        self._dealt = rank_count(told.get("tensor", 1), where)
        self._first = mp_rank - mp_rank % self._dealt
        self.tensors = self._tensors()
        """Name in the model → the tensor, of all files of experts."""
        self.layers = _layers_of(model, extra, self.tensors, where) if "num_experts" in model else None
        """How experts were spread; None: there are none."""

    def _tensors(self) -> dict[str, tuple[Tensor, Opened]]:
        found: dict[str, tuple[Tensor, Opened]] = {}
        home = self._mp_rank if self._dealt == 1 else self._first
        for (_, _, mp_rank), name in sorted(self._found.experts.items()):
            if mp_rank != home:
                continue
            opened = self._opener.torch(name)
            if not isinstance(opened.state, Mapping):
                raise CheckpointError(
                    f"{self._opener.directory / name} holds no parameters: it is no file of an expert"
                )
            found.update({key: (value, opened) for key, value in opened.state.items() if isinstance(value, Tensor)})
        return found

    def add(self, pieces: IntervalIndex) -> None:
        """Enter the values of experts."""
        for name, (tensor, opened) in self.tensors.items():
            pieces.shapes[name] = tensor.shape
            pieces.hold(name, "param", tensor, opened, f"the file of the expert of {name}")

    def frozen(self) -> Iterator[tuple[str, torch.Size, list[tuple[int, int]]]]:
        """Stage 3: (name, shape, ranks that have a part) of the experts that are not trained."""
        told = (self._extra.get("experts") or {}).get("frozen") or {}
        where = self._opener.directory
        layers = self.layers
        if layers is None or not isinstance(told, Mapping):
            return
        for listed, (size, ep) in told.items():
            shape = shapes_of([{listed: torch.Size(size)}], where)[0][listed]
            grid = layers.grid(rank_count(ep, where))
            for part in range(grid.ep):
                (name,) = layers.names([listed], grid.ep, part)
                yield name, shape, [self.place(grid.rank(part, copy)) for copy in range(grid.edp)]

    def number(self, dp_rank: int) -> int:
        """A rank of these files as `Open` numbers it."""
        return dp_rank * self._dealt + self._mp_rank - self._first

    def place(self, number: int) -> tuple[int, int]:
        """(data-parallel, model-parallel rank) of such a number."""
        return number // self._dealt, (self._mp_rank if self._dealt == 1 else self._first + number % self._dealt)

    def optimizers(self) -> dict[int, str]:
        """The optimizers' files by such numbers."""
        near = range(self._first, self._first + self._dealt) if self._dealt > 1 else [self._mp_rank]
        found = {(dp, mp): name for (dp, mp), name in self._found.optimizers.items() if mp in near}
        return {dp * self._dealt + mp - near[0]: name for (dp, mp), name in sorted(found.items())}

    def whole_optimizers(self, order: Sequence[Sequence[str]] | None, pieces: IntervalIndex) -> list[WholeOptimizer]:
        """Stage 0: the optimizer of each rank that is the first to have its part of the experts."""
        ours, known = bool(self._extra), self._extra.get("names")
        layers = self.layers
        if layers is None or (known is None and order is None):
            return []
        made = []
        files = {
            (part, mp): name
            for (part, mp), name in sorted(self._found.expert_optimizers.items())
            if mp == self._mp_rank or (self._dealt > 1 and self._first <= mp < self._first + self._dealt)
        }
        parts = len({part for part, _ in files})
        for (part, mp), name in files.items():
            opened = self._opener.torch(name)
            entries = opened.state["optimizer"]
            sizes = layers.of_groups(entries.get("optimizer_state_dict", entries)["param_groups"])
            names = known if known is not None else layers.expanded(order or (), sizes)
            writer = self._writer(parts, part, mp, layers)
            own: list[Sequence[str] | None] = [
                layers.names(group, size, layers.grid(size).part_of(writer))
                for group, size in zip(names, sizes, strict=True)
            ]
            if mp != self._mp_rank:  # of another slice's file only experts are this one's, too
                own = [group if size else None for group, size in zip(own, sizes, strict=True)]
            made.append(WholeOptimizer(opened, own, pieces, ours=ours))
        return made

    def _writer(self, parts: int, part: int, mp_rank: int, layers: ExpertLayers) -> int:
        """The first rank that has a part; where experts are dealt to slices, the first one of that slice."""
        grid = layers.grid(parts)
        ranks = sorted(grid.rank(part, copy) for copy in range(grid.edp))
        slot = mp_rank - self._first
        return next((rank for rank in ranks if self._dealt == 1 or rank % self._dealt == slot), ranks[0])
