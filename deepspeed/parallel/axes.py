"""Rank arithmetic: how a world of ranks is cut into groups along named axes; pure, no torch, no process groups.

The world is a grid in row-major order, the last axis fastest:

    pp   pipeline stages          slowest
    dp   data-parallel replicas
    sp   sequence-parallel ranks, neighbours within one replica
    tp   tensor-parallel ranks    fastest

Experts cut the same ranks a second time: within one pipeline stage and one tp index, the dp × sp ranks are taken
as `edp` replicas of `ep` neighbours (or the other way round). Several expert sizes may coexist.
"""

from __future__ import annotations

import itertools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar, overload

from deepspeed.errors import LayoutError

Ranks = tuple[int, ...]

A = TypeVar("A")


@dataclass(frozen=True)
class AxisKind:
    """What ranks along one axis of the grid do, and what others call the axis."""

    word: str
    splits_model: bool
    """Its ranks hold different parts of one model; ranks of other axes see different samples."""
    mesh: tuple[str, ...]
    """Names of the dim of a DeviceMesh."""
    mpu: tuple[str, ...]
    """The X of an mpu's get_X_parallel_{rank,group,world_size}, in the order they are tried."""


# slowest first
AXES: dict[str, AxisKind] = {
    "pp": AxisKind(
        "pipeline",
        splits_model=True,
        mesh=("pp", "pipe", "pipeline", "pipeline_parallel"),
        mpu=("pipeline_model", "pipe", "pipeline"),
    ),
    "dp": AxisKind("data", splits_model=False, mesh=("dp", "data", "data_parallel"), mpu=("data",)),
    "sp": AxisKind("sequence", splits_model=False, mesh=("sp", "sequence", "sequence_parallel"), mpu=("sequence",)),
    "tp": AxisKind(
        "tensor",
        splits_model=True,
        mesh=("tp", "tensor", "tensor_parallel", "model", "model_parallel"),
        mpu=("tensor_model", "slice"),
    ),
}
GRID_AXES = tuple(AXES)
SAMPLE_AXES = tuple(name for name, kind in AXES.items() if not kind.splits_model)
MODEL_AXES = tuple(name for name, kind in AXES.items() if kind.splits_model)
STAGE_AXES = tuple(name for name in AXES if name != "pp")


class AxisRoles(ABC, Generic[A]):
    """The axes of a layout by their roles."""

    @abstractmethod
    def __getitem__(self, names: str | tuple[str, ...]) -> A:
        """An axis, or any combination of axes, by short names."""

    @property
    def samples(self) -> A:
        """Ranks that see different samples or parts of them: gradients are averaged over these."""
        return self[SAMPLE_AXES]

    @property
    def model(self) -> A:
        """Ranks that together hold one copy of the model: stages × tensor slices."""
        return self[MODEL_AXES]

    @property
    def stage(self) -> A:
        """All ranks that work on one pipeline stage."""
        return self[STAGE_AXES]

    @property
    def data(self) -> A:
        """Ranks that load different samples."""
        return self["dp"]

    @property
    def sequence(self) -> A:
        """Ranks that share the sequences of one sample."""
        return self["sp"]

    @property
    def tensor(self) -> A:
        """Ranks that share the layers of one stage."""
        return self["tp"]

    @property
    def pipeline(self) -> A:
        """Ranks that hold the stages of one model."""
        return self["pp"]


class GridGroups(Sequence[Ranks]):
    """The groups of a grid along some of its axes, made when asked for: right by construction, cheap in any world.

    `along` and `across` are (size, stride) of the axes within a group and of those that tell groups apart.
    """

    __slots__ = ("_across", "_members")

    def __init__(self, along: Sequence[tuple[int, int]], across: Sequence[tuple[int, int]]) -> None:
        self._members = tuple(_sums([range(0, size * stride, stride) for size, stride in along]))
        self._across = _merged(across)

    def __len__(self) -> int:
        return math.prod(size for size, _ in self._across)

    @overload
    def __getitem__(self, number: int) -> Ranks: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[Ranks, ...]: ...
    def __getitem__(self, number: int | slice) -> Ranks | tuple[Ranks, ...]:
        if isinstance(number, slice):
            return tuple(self[place] for place in range(len(self))[number])
        rest, start = range(len(self))[number], 0
        for size, stride in reversed(self._across):
            rest, place = divmod(rest, size)
            start += place * stride
        return tuple(start + member for member in self._members) if start else self._members

    def number_of(self, rank: int) -> int:
        """The group that holds `rank`."""
        number = 0
        for size, stride in self._across:
            number = number * size + rank // stride % size
        return number

    def has(self, ranks: Ranks) -> bool:
        return bool(ranks) and len(ranks) == len(self._members) and self[self.number_of(ranks[0])] == ranks

    def __eq__(self, other: object) -> bool:
        if isinstance(other, GridGroups):
            return (self._members, self._across) == (other._members, other._across)
        return isinstance(other, Sequence) and len(self) == len(other) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


@dataclass(frozen=True)
class Axis:
    """One way to cut the world: groups of equal size that hold every rank exactly once, each in rank order."""

    name: str
    groups: Sequence[Ranks]

    def __post_init__(self) -> None:
        if isinstance(self.groups, GridGroups):
            return
        sizes = {len(group) for group in self.groups}
        if len(sizes) != 1 or 0 in sizes:
            raise LayoutError(
                f"the groups of axis {self.name!r} have the sizes {sorted(sizes)}; all must be equal and not 0. "
                "Choose sizes that divide the world evenly."
            )
        if sorted(itertools.chain.from_iterable(self.groups)) != list(range(self.world)):
            raise LayoutError(
                f"the groups of axis {self.name!r} do not hold each of the ranks 0 to {self.world - 1} exactly "
                f"once: {_shown(self.groups)}. List every rank in exactly one group."
            )
        # torch numbers the members of a group in rank order; any other order here would disagree with it.
        if self.size > 1 and any(list(group) != sorted(group) for group in self.groups):
            raise LayoutError(
                f"the groups of axis {self.name!r} are not in rank order: {_shown(self.groups)}. Sort each group."
            )

    @property
    def world(self) -> int:
        """Ranks in all groups together."""
        return self.size * len(self.groups)

    @cached_property
    def size(self) -> int:
        """Ranks per group."""
        return len(self.groups[0])

    @cached_property
    def _where(self) -> dict[int, int]:
        """Rank → number of its group."""
        return {rank: number for number, group in enumerate(self.groups) for rank in group}

    def group_of(self, rank: int) -> Ranks:
        """The group that holds `rank`."""
        return self.groups[self._number(rank)]

    def _number(self, rank: int) -> int:
        if not 0 <= rank < self.world:
            raise LayoutError(f"rank {rank} is outside the world; use 0 to {self.world - 1}.")
        return self.groups.number_of(rank) if isinstance(self.groups, GridGroups) else self._where[rank]


class ExpertAxes(NamedTuple):
    """The two axes of one expert-parallel size: tokens travel over `ep`, expert gradients reduce over `edp`."""

    ep: Axis
    edp: Axis


@dataclass(frozen=True)
class RankGrid:
    """Ranks 0 to world − 1 laid out in row-major order over named axes, the last one fastest."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes):
            raise LayoutError(
                f"{len(self.names)} axes {list(self.names)} were given {len(self.sizes)} sizes "
                f"{list(self.sizes)}; give one size for each axis."
            )
        if len(set(self.names)) != len(self.names):
            raise LayoutError(f"an axis is named twice in {list(self.names)}; give each axis its own name.")
        for name, size in zip(self.names, self.sizes, strict=True):
            _positive(name, size)

    @cached_property
    def world(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """The distance in ranks between two neighbours of each axis."""
        return tuple(math.prod(self.sizes[place + 1 :]) for place in range(len(self.sizes)))

    def size(self, name: str) -> int:
        """Ranks along one axis."""
        return self.sizes[self._place(name)]

    def coords(self, rank: int) -> tuple[int, ...]:
        """The coordinates of `rank`, in the order of the axes."""
        if not 0 <= rank < self.world:
            raise LayoutError(f"rank {rank} is outside the world; use 0 to {self.world - 1}.")
        return tuple(rank // stride % size for stride, size in zip(self.strides, self.sizes, strict=True))

    def rank(self, coords: Mapping[str, int]) -> int:
        """The rank at these coordinates; every axis must be given."""
        for name in coords:
            self._place(name)
        missing = [name for name in self.names if name not in coords]
        if missing:
            raise LayoutError(
                f"no coordinate for axis {missing[0]!r}; a rank needs one for each of {list(self.names)}."
            )
        return sum(
            self._coordinate(name, coords[name]) * stride for name, stride in zip(self.names, self.strides, strict=True)
        )

    def where(self, coords: Mapping[str, int]) -> list[int]:
        """All ranks, in order, that have the given coordinates on the given axes."""
        for name in coords:
            self._place(name)
        choices = [
            (coords[name] * stride,) if name in coords else range(0, size * stride, stride)
            for name, size, stride in zip(self.names, self.sizes, self.strides, strict=True)
        ]
        if any(not 0 <= coords[name] < self.size(name) for name in coords):
            return []
        return _sums(choices)

    def axis(self, *names: str) -> Axis:
        """The groups of ranks that differ only in the given axes, ordered by the coordinates of the others.

        Without a name every rank is a group of its own.
        """
        chosen = {self._place(name) for name in names}
        if len(chosen) != len(names):
            raise LayoutError(f"an axis is named twice in {list(names)}; name each axis once.")
        spans = list(zip(self.sizes, self.strides, strict=True))
        along = [span for place, span in enumerate(spans) if place in chosen]
        across = [span for place, span in enumerate(spans) if place not in chosen]
        label = "+".join(self.names[place] for place in sorted(chosen)) or "alone"
        return Axis(label, GridGroups(along, across))

    def _coordinate(self, name: str, value: int) -> int:
        if not 0 <= value < self.size(name):
            raise LayoutError(f"coordinate {value} of axis {name!r} is out of range; use 0 to {self.size(name) - 1}.")
        return value

    def _place(self, name: str) -> int:
        if name not in self.names:
            raise LayoutError(f"there is no axis {name!r}; the axes are {list(self.names)}.")
        return self.names.index(name)


@dataclass(frozen=True)
class LayoutPlan(AxisRoles[Axis]):
    """The rank lists of a layout, made without any process: `plan["dp"].groups`, `plan.experts(ep=8).edp`."""

    grid: RankGrid

    @classmethod
    def fit(cls, world: int, *, dp: int | None = None, **sizes: int) -> LayoutPlan:
        """The plan for `world` ranks; dp follows from the other sizes, and must agree with them where given.

        `sizes` are those of other axes, by their short names; axes that are not named have size 1.
        """
        _positive("world size", world)
        for name, size in sizes.items():
            if name not in AXES:
                raise LayoutError(f"there is no axis {name!r}; the axes are {list(AXES)}.")
            _positive(name, size)
        given = {name: sizes.get(name, 1) for name in AXES if name != "dp"}
        product = math.prod(given.values())
        if world % product:
            raise LayoutError(_indivisible(world, given, product))
        found = world // product
        planned = {name: given.get(name, dp or found) for name in AXES}
        if dp is not None and _positive("dp", dp) != found:
            raise LayoutError(
                f"{_equation(planned)} processes are planned, but the world size is {world}. "
                f"Use {math.prod(planned.values())} processes, or dp {found}, or leave dp out."
            )
        return cls(RankGrid(GRID_AXES, tuple(planned.values())))

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.grid.world

    @property
    def sizes(self) -> dict[str, int]:
        """Axis → ranks along it, slowest first."""
        return dict(zip(self.grid.names, self.grid.sizes, strict=True))

    def __getitem__(self, names: str | tuple[str, ...]) -> Axis:
        if not names:
            raise LayoutError(f"an axis was asked for without a name; use one or more of {list(self.grid.names)}.")
        return self.grid.axis(*((names,) if isinstance(names, str) else names))

    def __iter__(self) -> Iterator[Axis]:
        """The axes of the grid, slowest first."""
        return (self.grid.axis(name) for name in self.grid.names)

    def experts(self, ep: int, *, data_first: bool = False, fold_tp: bool = False) -> ExpertAxes:
        """The axes of experts spread over `ep` ranks.

        Neighbouring ranks share the experts and replicas are strided; `data_first` swaps the two. With `fold_tp`
        the experts are not tensor-parallel: a stage's tp ranks count as further data-parallel ranks.
        """
        over = STAGE_AXES if fold_tp else SAMPLE_AXES
        data = self[over]
        _positive("ep", ep)
        if data.size % ep:
            sizes = {name: self.grid.size(name) for name in over}
            divisors = [size for size in range(1, data.size + 1) if data.size % size == 0]
            raise LayoutError(
                f"expert-parallel size {ep} does not divide the {data.size} ranks ({_equation(sizes)}) that hold "
                f"copies of one pipeline stage. Use {_alternatives(divisors)}."
            )
        return _expert_axes(data, ep, data_first)


def expert_parallel_ranks(
    world: int, *, tp: int, ep: int, pp: int = 1, data_first: bool = False
) -> tuple[list[list[int]], list[list[int]]]:
    """The rank lists of the expert-parallel and the expert-data-parallel groups.

    World 16, tp 2, ep 4: [0,2,4,6] [8,10,12,14] [1,3,5,7] [9,11,13,15] and [0,8] [2,10] [4,12] [6,14] [1,9] …
    """
    axes = LayoutPlan.fit(world, pp=pp, tp=tp).experts(ep, data_first=data_first)
    return [list(group) for group in axes.ep.groups], [list(group) for group in axes.edp.groups]


def _expert_axes(data: Axis, ep: int, data_first: bool) -> ExpertAxes:
    near, far = (data.size // ep, ep) if data_first else (ep, data.size // ep)
    neighbours = tuple(ranks[start * near : (start + 1) * near] for ranks in data.groups for start in range(far))
    strided = tuple(ranks[start::near] for ranks in data.groups for start in range(near))
    by_ep, by_edp = (strided, neighbours) if data_first else (neighbours, strided)
    return ExpertAxes(Axis(f"ep{ep}", by_ep), Axis(f"edp{ep}", by_edp))


def _sums(choices: Sequence[Iterable[int]]) -> list[int]:
    """The sum of each way to choose one of every iterable, the last one fastest."""
    sums = [0]
    for choice in choices:
        sums = [start + step for start in sums for step in choice]
    return sums


def _merged(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The same (size, stride) of fewer axes: equal for axes that tell the same groups apart in the same order."""
    merged: list[tuple[int, int]] = []
    for size, stride in spans:
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            size *= merged.pop()[0]
        merged.append((size, stride))
    return tuple(merged)


def _positive(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise LayoutError(f"{name} is {value!r}; it must be a whole number of at least 1.")
    return number


def _equation(sizes: Mapping[str, int]) -> str:
    """`pp 2 × tp 4 = 8`; axes of size 1 are left out."""
    shown = {name: size for name, size in sizes.items() if size > 1} or dict(list(sizes.items())[:1])
    terms = " × ".join(f"{name} {size}" for name, size in shown.items())
    return terms if len(shown) == 1 else f"{terms} = {math.prod(shown.values())}"


def _indivisible(world: int, sizes: Mapping[str, int], product: int) -> str:
    words = "/".join(AXES[name].word for name, size in sizes.items() if size > 1)
    below = world // product * product
    counts = [count for count in (below, below + product) if count]
    plural = "s" if "/" in words else ""
    return (
        f"world size {world} is not divisible by {_equation(sizes)}. "
        f"Use {_alternatives(counts)} processes, or change the {words} size{plural}."
    )


def _alternatives(numbers: Sequence[int]) -> str:
    *others, last = (str(number) for number in numbers)
    return f"{', '.join(others)} or {last}" if others else last


def _shown(groups: Sequence[Ranks]) -> str:
    text = ", ".join(str(list(group)) for group in groups[:4])
    return f"{text}, …" if len(groups) > 4 else text
