"""What every rank of a grid would give to a checkpoint writer of one small model with experts, without any rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from deepspeed.checkpoint.formats.training_state import Experts, GroupState, TrainingState
from deepspeed.checkpoint.formats.zero_files.expert_files import ExpertLayers, layer_of, number_of
from deepspeed.fragments import Block, Striped

ONE, TWO = (f"{name}.deepspeed_moe.experts.deepspeed_experts." for name in ("one", "two"))
EXPERTS = {ONE: 4, TWO: 8}
DENSE = {"inward.weight": (3, 5), "inward.bias": (3,)}
EXPERT = {"weight": (2, 3), "bias": (3,)}
FROZEN = {"frozen": (5,), f"{ONE}%.frozen": (3,)}
BUFFERS = {"buffer": (2,), f"{TWO}%.seen": (2,)}


@dataclass(frozen=True)
class Grid:
    """How many ranks there are, and over how many of them the experts of both layers are spread."""

    stage: int
    world: int
    one: int
    two: int
    data_first: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """Layer → ranks."""
        return {ONE: self.one, TWO: self.two}


def _numbered(shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, torch.Size]]:
    for name, shape in shapes.items():
        layer = name.partition("%")[0]
        for number in range(EXPERTS[layer]) if "%" in name else [0]:
            yield name.replace("%", str(number)), torch.Size(shape)


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


def states(grid: Grid, *, frozen_experts: bool = True) -> list[TrainingState]:
    """Of every rank."""
    return [_state(grid, rank, frozen_experts) for rank in range(grid.world)]


def _holds(layers: ExpertLayers, grid: Grid, rank: int, name: str) -> bool:
    layer = layer_of(name)
    if layer is None:
        return True
    ep = grid.sizes[layer]
    return number_of(name) // (EXPERTS[layer] // ep) == layers.grid(ep).part_of(rank)


def _state(grid: Grid, rank: int, frozen_experts: bool) -> TrainingState:
    layers, whole = ExpertLayers(EXPERTS, grid.world, grid.data_first), whole_model()
    groups = [_group(grid, layers, rank, ep) for ep in (0, *sorted({grid.one, grid.two}))]
    values = {**whole["master"], **whole["fixed"]}
    if not frozen_experts:
        values = {name: tensor for name, tensor in values.items() if not (layer_of(name) and "frozen" in name)}
    here = {name: tensor for name, tensor in values.items() if _holds(layers, grid, rank, name)}
    frozen = {name: tensor.shape for name, tensor in here.items() if name.endswith("frozen")}
    module = {name: _striped(grid, layers, rank, name, here[name]) for name in here}
    firsts = {layer: layers.grid(ep).copy_of(rank) == 0 for layer, ep in grid.sizes.items()}
    most = layers.grid(max(grid.one, grid.two))
    return TrainingState(
        stage=grid.stage,
        precision="fp32",
        module=module,
        groups=groups,
        buffers=[name for name in here if name.endswith(("buffer", "seen"))],
        frozen=frozen,
        dp_rank=rank,
        dp_size=grid.world,
        experts=Experts(
            EXPERTS, grid.data_first, most.part_of(rank), most.copy_of(rank) == 0, firsts, sizes=grid.sizes
        ),
    )


def _copies(grid: Grid, layers: ExpertLayers, rank: int, ep: int) -> tuple[int, int]:
    """(ranks that share a parameter, which of them this one is)."""
    return (layers.grid(ep).edp, layers.grid(ep).copy_of(rank)) if ep else (grid.world, rank)


def _striped(grid: Grid, layers: ExpertLayers, rank: int, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if grid.stage < 3 or name in whole_buffers():
        return tensor
    world, place = _copies(grid, layers, rank, grid.sizes.get(layer_of(name) or "", 0))
    start, stop = Striped((tensor.numel(),), world).interval(0, place)
    return tensor.reshape(-1)[start:stop]


def whole_buffers() -> set[str]:
    """What is no parameter."""
    return {name for name, _ in _numbered(BUFFERS)}


def _group(grid: Grid, layers: ExpertLayers, rank: int, ep: int) -> GroupState:
    whole = whole_model()
    names = [
        name
        for name in whole["master"]
        if grid.sizes.get(layer_of(name) or "", 0) == ep and _holds(layers, grid, rank, name)
    ]
    world, place = _copies(grid, layers, rank, ep)
    shapes = [whole["master"][name].shape for name in names]
    numels = tuple(shape.numel() for shape in shapes)
    layout = None if grid.stage == 0 else Striped(numels, world) if grid.stage == 3 else Block(numels, world)
    tensors: dict[str, list[torch.Tensor | None]] = {}
    for kind in ("master", "exp_avg"):
        column: list[torch.Tensor | None] = []
        for number, name in enumerate(names):
            start, stop = (0, numels[number]) if layout is None else layout.interval(number, place)
            flat = whole[kind][name].reshape(-1)[start:stop]
            column.append(whole[kind][name] if layout is None else flat if start < stop else None)
        tensors[kind] = column
    settings = {"lr": 0.1, **({"name": f"ep_size_{ep}", "moe": True} if ep else {"name": "dense-params"})}
    scalars = [{"step": 3} for _ in names]
    return GroupState(names, shapes, tensors, scalars, settings, layout, 0 if layout is None else place, ep=ep)
