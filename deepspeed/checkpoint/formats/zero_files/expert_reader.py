"""What DeepSpeed's files hold of experts: values in files of their own, and which rank's optimizer has their states."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.formats.bounds import rank_count, shapes_of
from deepspeed.checkpoint.formats.checked_files import Opened, Opener
from deepspeed.checkpoint.formats.expert_slices import slices_in
from deepspeed.checkpoint.formats.source import Piece, Pieces
from deepspeed.checkpoint.formats.zero_files.expert_files import ExpertLayers, layers_of
from deepspeed.checkpoint.formats.zero_files.file_names import Found
from deepspeed.checkpoint.formats.zero_files.flat_reader import Spread
from deepspeed.checkpoint.formats.zero_files.whole_optimizer import WholeOptimizer
from deepspeed.errors import CheckpointError

__all__ = ["ExpertReader"]


class ExpertReader:
    """The experts in the files of one model-parallel rank."""

    def __init__(
        self, found: Found, opener: Opener, mp_rank: int, model: Mapping[str, Any], extra: Mapping[str, Any]
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
        self.spread: Spread | None = None
        """How experts were spread; None: there are none."""
        if "num_experts" in model:
            self.spread = Spread(layers_of(model, extra, self.tensors, where), told.get("sizes"))

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

    def add(self, pieces: Pieces) -> None:
        """Enter the values of experts."""
        for name, (tensor, opened) in self.tensors.items():
            pieces.shapes[name] = tensor.shape
            load = functools.partial(_loaded, tensor, opened)
            pieces.add(name, "param", Piece((0, tensor.numel()), load, 0, f"the file of the expert of {name}"))

    def frozen(self) -> Iterator[tuple[str, torch.Size, list[tuple[int, int]]]]:
        """Stage 3: (name, shape, ranks that have a part) of the experts that are not trained."""
        told = (self._extra.get("experts") or {}).get("frozen") or {}
        where = self._opener.directory
        if self.spread is None or not isinstance(told, Mapping):
            return
        layers = self.spread.layers
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

    def whole_optimizers(self, order: Sequence[Sequence[str]] | None, pieces: Pieces) -> list[WholeOptimizer]:
        """Stage 0: the optimizer of each rank that is the first to have its part of the experts."""
        ours, known = bool(self._extra), self._extra.get("names")
        if self.spread is None or (known is None and order is None):
            return []
        layers, made = self.spread.layers, []
        files = {
            (part, mp): name
            for (part, mp), name in sorted(self._found.expert_optimizers.items())
            if mp == self._mp_rank or (self._dealt > 1 and self._first <= mp < self._first + self._dealt)
        }
        parts = len({part for part, _ in files})
        for (part, mp), name in files.items():
            opened = self._opener.torch(name)
            entries = opened.state["optimizer"]
            sizes = self.spread.of(entries.get("optimizer_state_dict", entries)["param_groups"])
            names = known if known is not None else layers.expanded(order or (), sizes)
            own: list[Sequence[str] | None] = list(
                _names_on(self._writer(parts, part, mp, layers), layers, names, sizes)
            )
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


def _names_on(
    rank: int, layers: ExpertLayers, names: Sequence[Sequence[str]], sizes: Sequence[int]
) -> list[Sequence[str]]:
    """What a rank lists of each group, of what the first rank lists."""
    return [
        layers.names(group, size, layers.grid(size).part_of(rank)) for group, size in zip(names, sizes, strict=True)
    ]


def _loaded(tensor: Tensor, opened: Opened) -> tuple[Tensor, Opened]:
    return tensor, opened
