"""What every rank of a grid would give to a checkpoint writer of one small model with experts, without any rank."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from deepspeed.checkpoint.formats.training_state import ExpertState, GroupState, TrainingState
from deepspeed.checkpoint.formats.zero_files.experts import ExpertLayers, layer_of, number_of
from deepspeed.fragments import ContiguousLayout, DimSplit, StripedLayout, even

ONE, TWO = (f"{name}.deepspeed_moe.experts.deepspeed_experts." for name in ("one", "two"))
EXPERTS = {ONE: 4, TWO: 8}
DENSE = {"inward.weight": (4, 5), "inward.bias": (3,)}
EXPERT = {"weight": (3, 4), "bias": (3,)}
FROZEN = {"frozen": (5,), f"{ONE}%.frozen": (3,)}
BUFFERS = {"buffer": (2,), f"{TWO}%.seen": (2,)}


@dataclass(frozen=True)
class Grid:
    """How many ranks there are, and over how many of them the experts of both layers are spread."""

    stage: int
    world: int
    """Data-parallel ranks."""
    one: int
    two: int
    data_first: bool = False
    tensor: int = 1
    """Tensor-parallel ranks."""
    dealt: bool = False
    """Experts lie on these as on data-parallel ranks; else each of them has a part of every expert."""
    frozen_experts: bool = True

    @property
    def sizes(self) -> dict[str, int]:
        """Layer → ranks."""
        return {ONE: self.one, TWO: self.two}

    @property
    def layers(self) -> ExpertLayers:
        """Who has which expert."""
        return ExpertLayers(EXPERTS, self.world, self.data_first, self.tensor if self.dealt else 1)

    def splits(self, names: dict[str, torch.Tensor]) -> dict[str, DimSplit]:
        """How parameters are cut over tensor-parallel ranks."""
        if self.tensor == 1:
            return {}
        found = {"inward.weight": DimSplit.of(0, [even(4, self.tensor)])}
        if not self.dealt:
            experts = [name for name in names if layer_of(name) and name.endswith(".weight")]
            found |= {name: DimSplit.of(1, [even(4, self.tensor)]) for name in experts}
        return found


def _numbered(shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, torch.Size]]:
    for name, shape in shapes.items():
        layer = name.partition("%")[0]
        for number in range(EXPERTS[layer]) if "%" in name else [0]:
            yield name.replace("%", str(number)), torch.Size(shape)


@functools.cache
def whole_model() -> dict[str, dict[str, torch.Tensor]]:
    """kind → name → the whole tensor."""
    generator = torch.Generator().manual_seed(0)
    every = {**DENSE, **{f"{layer}%.{name}": shape for layer in EXPERTS for name, shape in EXPERT.items()}}
    trained = dict(_numbered(every))
    fixed = dict(_numbered({**FROZEN, **BUFFERS}))
    return {
        "master": {name: torch.randn(shape, generator=generator) for name, shape in trained.items()},
        "exp_avg": {name: torch.randn(shape, generator=generator) for name, shape in trained.items()},
        "fixed": {name: torch.randn(shape, generator=generator) for name, shape in fixed.items()},
    }


def states(grid: Grid) -> list[TrainingState]:
    """Of every rank."""
    return [_Rank(grid, dp, tp).state() for dp in range(grid.world) for tp in range(grid.tensor)]


@dataclass(frozen=True)
class _Rank:
    grid: Grid
    dp: int
    tp: int

    @property
    def number(self) -> int:
        """Among the ranks over which experts are spread."""
        return self.dp * self.grid.tensor + self.tp if self.grid.dealt else self.dp

    def holds(self, name: str) -> bool:
        layer = layer_of(name)
        if layer is None:
            return True
        ep = self.grid.sizes[layer]
        return number_of(name) // (EXPERTS[layer] // ep) == self.grid.layers.grid(ep).part_of(self.number)

    def part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        split = self.grid.splits({name: tensor}).get(name)
        return tensor if split is None else split.cut(tensor, self.tp)

    def copies(self, ep: int) -> tuple[int, int]:
        """(ranks that share a parameter, which of them this one is)."""
        found = self.grid.layers.grid(ep)
        return (found.edp, found.copy_of(self.number)) if ep else (self.grid.world, self.dp)

    def state(self) -> TrainingState:
        grid, whole = self.grid, whole_model()
        layers = grid.layers
        values = {**whole["master"], **whole["fixed"]}
        if not grid.frozen_experts:
            values = {name: tensor for name, tensor in values.items() if not (layer_of(name) and "frozen" in name)}
        here = {name: self.part(name, tensor) for name, tensor in values.items() if self.holds(name)}
        firsts = {layer: layers.grid(ep).copy_of(self.number) == 0 for layer, ep in grid.sizes.items()}
        most = layers.grid(max(grid.one, grid.two))
        first = most.copy_of(self.number) == 0 or (grid.dealt and self.dp == 0)
        return TrainingState(
            stage=grid.stage,
            precision="fp32",
            module={name: self.striped(name, tensor) for name, tensor in here.items()},
            groups=[self.group(ep) for ep in (0, *sorted({grid.one, grid.two}))],
            buffers=[name for name in here if name in dict(_numbered(BUFFERS))],
            frozen={name: tensor.shape for name, tensor in here.items() if name.endswith("frozen")},
            dp_rank=self.dp,
            dp_size=grid.world,
            mp_rank=self.tp,
            mp_size=grid.tensor,
            splits={name: split for name, split in grid.splits(here).items() if name in here},
            experts=ExpertState(
                EXPERTS,
                grid.data_first,
                most.part_of(self.number),
                first,
                firsts,
                sizes=grid.sizes,
                tensor=layers.tensor,
            ),
        )

    def striped(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if self.grid.stage < 3 or name in dict(_numbered(BUFFERS)):
            return tensor
        world, place = self.copies(self.grid.sizes.get(layer_of(name) or "", 0))
        start, stop = StripedLayout((tensor.numel(),), world).interval(0, place)
        return tensor.reshape(-1)[start:stop]

    def group(self, ep: int) -> GroupState:
        grid, whole = self.grid, whole_model()
        names = [name for name in whole["master"] if grid.sizes.get(layer_of(name) or "", 0) == ep and self.holds(name)]
        own = {kind: [self.part(name, whole[kind][name]) for name in names] for kind in ("master", "exp_avg")}
        world, place = self.copies(ep)
        shapes = [tensor.shape for tensor in own["master"]]
        numels = tuple(shape.numel() for shape in shapes)
        layout = (
            None
            if grid.stage == 0
            else StripedLayout(numels, world)
            if grid.stage == 3
            else ContiguousLayout(numels, world)
        )
        tensors: dict[str, list[torch.Tensor | None]] = {kind: list(column) for kind, column in own.items()}
        if layout is not None:
            for kind, column in own.items():
                cuts = [layout.interval(number, place) for number in range(len(names))]
                flats = [tensor.reshape(-1)[a:b] for tensor, (a, b) in zip(column, cuts, strict=True)]
                tensors[kind] = [flat if flat.numel() else None for flat in flats]
        settings = {"lr": 0.1, **({"name": f"ep_size_{ep}", "moe": True} if ep else {"name": "dense-params"})}
        scalars = [{"step": 3} for _ in names]
        rank = 0 if layout is None else place
        known = ("exp_avg", "master")
        return GroupState(names, shapes, tensors, scalars, settings, layout, rank, known, ep)
