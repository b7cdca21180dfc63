"""What a rank holds, and which tier holds it: from sizes and budgets to bytes and a plan; no processes, no tensors.

[Note: states of a rank]

           parameters       gradients   masters     optimizer states
stage 0    whole            whole       whole       whole
stage 1    whole, padded    whole       shard       fragments
stage 2    whole, padded    fragments   shard       fragments
stage 3    shard            fragments   fragments   fragments

A shard has the padding of its layout (`deepspeed.fragments`: a `ContiguousLayout` of every optimizer group at stages 1
and 2, `StripedLayout` at stage 3) and is of one size on all ranks. Fragments have no padding, so they differ between
ranks; rank 0 has the most (unless `gap` leaves holes). On one rank every stage is stage 0.

[Note: places of units] A `StateUnit` is what moves together: the masters, moments and gradients of a tile, or the
parameters of a block at stage 3; its parts say so by kind. Units are given in the order in which they should get fast
memory, such as parameters, which every micro step uses twice, before optimizer states, which a step uses once. Each
tier takes the next units for as long as they fit, so that a tier holds one run of that order: with more of a budget
no unit moves to a slower tier.

A part may have tiers of its own: gradients of what is on the disk wait in host memory, and a master that is the
parameter itself takes memory only where the parameter is not. A budget may keep a window back: bytes that a tier needs,
once anything lies in a slower one, for what is on its way.

[Note: units of a model] What moves is what a rank holds of one parameter. Below stage 3 whole parameters stay on the
device. Gradients go with the states of their parameter, as far as host memory; only while everything is on the device
they are whole at stage 1, too.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TextIO

from deepspeed.config.memory import MemoryConfig, size_text
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.fragments import ContiguousLayout, FlatLayout, StripedLayout


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes of one element, by role; the defaults are those of 16-bit training with Adam."""

    param: int = 2
    grad: int = 4
    master: int = 4
    """0 where the optimizer updates the parameters themselves."""
    optimizer: float = 8
    """All states of the optimizer together: two fp32 moments take 8."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How states lie on the ranks, and the rank that is asked about."""

    stage: int
    world: int
    rank: int = 0
    gap: int = 1
    """At stages 1 and 2, a parameter begins at a multiple of so many elements (`parameter_alignment`)."""
    persistent: int = 0
    """At stage 3, parameters of up to so many elements are kept whole, padded, beside their shard."""

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise UsageError(f"stage is {self.stage}; it must be 0, 1, 2 or 3")
        if not 0 <= self.rank < self.world:
            raise UsageError(f"rank is {self.rank} of {self.world} ranks; it must be from 0 to {self.world - 1}")


@dataclass(frozen=True, slots=True)
class ModelStates:
    """Bytes that one rank holds, padding included."""

    params: int
    grads: int
    masters: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.params + self.grads + self.masters + self.optimizer


def model_states(
    groups: Sequence[Sequence[int]], spread: Spread, *, widths: Widths = Widths(), frozen: Sequence[int] = ()
) -> ModelStates:
    """What a rank holds of parameters with these numbers of elements.

    `groups` are the trained parameters of every optimizer group, in the group's order; `frozen` are the others, which
    have no gradient, master or optimizer state. Parameters of another dtype are a group of their own.
    """
    whole = sum(chain.from_iterable(groups))
    params, grads, masters, states = whole + sum(frozen), whole, whole, whole
    if spread.stage > 0 and spread.world > 1:
        layouts = [_layout(tuple(group), spread) for group in groups]
        states = sum(sum(_intervals(layout, spread.rank)) for layout in layouts)
        grads = whole if spread.stage == 1 else states
        if spread.stage == 3:
            everything = (*chain.from_iterable(groups), *frozen)
            params = StripedLayout(everything, spread.world).shard_numel
            lasting = tuple(numel for numel in everything if numel <= spread.persistent)
            params += StripedLayout(lasting, spread.world).shard_numel * spread.world
            masters = states
        else:
            masters = sum(layout.shard_numel for layout in layouts)
            params = masters * spread.world + sum(frozen)
    moments = math.ceil(states * widths.optimizer)
    return ModelStates(params * widths.param, grads * widths.grad, masters * widths.master, moments)


def _layout(numels: tuple[int, ...], spread: Spread) -> FlatLayout:
    return (
        StripedLayout(numels, spread.world)
        if spread.stage == 3
        else ContiguousLayout(numels, spread.world, gap=spread.gap)
    )


def fragments(group: Sequence[int], spread: Spread) -> list[int]:
    """Elements that a rank updates of each parameter of an optimizer group."""
    if spread.stage == 0 or spread.world == 1:
        return list(group)
    return _intervals(_layout(tuple(group), spread), spread.rank)


def _intervals(layout: FlatLayout, rank: int) -> list[int]:
    intervals = (layout.interval(param, rank) for param in range(len(layout.numels)))
    return [stop - start for start, stop in intervals]


DEVICE, HOST, DISK = "device", "host", "disk"
"""Names of the tiers, which are the keys of the config's `memory` section."""

_ORDER = (DEVICE, HOST, DISK)


@dataclass(frozen=True, slots=True)
class StatePart:
    """Elements of one kind of state."""

    kind: str
    """As a reader knows it: masters, moments, gradients, parameters."""
    elements: int
    width: float
    """Bytes per element; moments of 8 bits with their scales have a fraction."""
    fastest: str = DEVICE
    """In faster tiers than this one it takes no memory."""
    slowest: str = DISK
    """In slower tiers than this one it does not lie: it stays in this one."""

    def __post_init__(self) -> None:
        if self.elements < 0 or not 0 <= self.width < math.inf:
            raise UsageError(f"{self.elements} {self.kind} of {self.width} bytes each; neither may be below zero")

    @property
    def nbytes(self) -> int:
        """Whole bytes."""
        return math.ceil(self.elements * self.width)

    def lies_in(self, tier: str) -> str | None:
        """Where it is if its unit is in `tier`; None: it takes no memory then."""
        if _ORDER.index(tier) < _ORDER.index(self.fastest):
            return None
        return min(tier, self.slowest, key=_ORDER.index)


@dataclass(frozen=True, slots=True)
class StateUnit:
    """What is in one tier as a whole."""

    name: str
    parts: tuple[StatePart, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    def takes(self, tier: str, unit_in: str) -> int:
        """Bytes that it takes in `tier` if it is in `unit_in`."""
        return sum(part.nbytes for part in self.parts if part.lies_in(unit_in) == tier)


@dataclass(frozen=True, slots=True)
class Budget:
    """What a rank may use of a tier."""

    tier: str
    limit: int | None
    """Bytes; None is no limit."""
    window: int = 0
    """Bytes of it that are kept back if anything lies in a slower tier."""


@dataclass(frozen=True, slots=True)
class TierUse:
    """What a tier holds of one kind; `share` is its part of the budget, None where there is no limit."""

    tier: str
    kind: str
    elements: int
    nbytes: int
    share: float | None


@dataclass(frozen=True)
class TierPlan:
    """Where every unit lives."""

    units: tuple[StateUnit, ...]
    budgets: tuple[Budget, ...]
    tiers: tuple[str, ...]
    """The tier of each unit."""

    @cached_property
    def used(self) -> dict[str, int]:
        """Bytes of units in every tier."""
        return {budget.tier: sum(part.nbytes for part in self._parts_in(budget.tier)) for budget in self.budgets}

    def elements(self, kind: str) -> dict[str, int]:
        """How many of a kind belong to the units of every tier."""
        found = {budget.tier: 0 for budget in self.budgets}
        for unit, tier in zip(self.units, self.tiers, strict=True):
            found[tier] += sum(part.elements for part in unit.parts if part.kind == kind)
        return found

    def _parts_in(self, tier: str) -> list[StatePart]:
        placed = zip(self.units, self.tiers, strict=True)
        return [part for unit, at in placed for part in unit.parts if part.lies_in(at) == tier]

    @property
    def rows(self) -> list[TierUse]:
        """Tier by tier, kinds in the order of the units, then the window that is kept back."""
        found: list[TierUse] = []
        for at, budget in enumerate(self.budgets):
            kinds: dict[str, tuple[int, int]] = {}
            for part in self._parts_in(budget.tier):
                elements, nbytes = kinds.get(part.kind, (0, 0))
                kinds[part.kind] = (elements + part.elements, nbytes + part.nbytes)
            if budget.window and any(slower.tier in self.tiers for slower in self.budgets[at + 1 :]):
                kinds["on the way"] = (0, budget.window)
            for kind, (elements, nbytes) in kinds.items():
                share = None if budget.limit is None else nbytes / budget.limit if budget.limit else 0.0
                found.append(TierUse(budget.tier, kind, elements, nbytes, share))
        return found


def budgets_of(
    section: MemoryConfig, *, ranks: int = 1, windows: Mapping[str, int] | None = None
) -> tuple[Budget, ...]:
    """What each of `ranks` ranks on a machine may use, the fastest tier first; without a size there is no disk."""
    if ranks < 1:
        raise UsageError(f"ranks is {ranks}; a machine has at least this one")
    limits: dict[str, int | None] = {
        DEVICE: section.device,
        HOST: None if section.host is None else section.host // ranks,
    }
    if section.disk is not None:
        limits[DISK] = section.disk // ranks
    return tuple(Budget(tier, limit, (windows or {}).get(tier, 0)) for tier, limit in limits.items())


def place(units: Sequence[StateUnit], budgets: Sequence[Budget]) -> TierPlan:
    """Units in the fastest tiers that hold them, in their order; an error where some find no place."""
    tiers: list[str] = []
    for at, budget in enumerate(budgets):
        rest = units[len(tiers) :]
        sizes = [unit.takes(budget.tier, budget.tier) for unit in rest]
        if budget.limit is None or sum(sizes) <= budget.limit:
            tiers += [budget.tier] * len(rest)
            break
        room, stay = budget.limit, [0] * len(rest)
        if at + 1 < len(budgets):  # what does not fit here leaves some parts here all the same
            stay = [unit.takes(budget.tier, budgets[at + 1].tier) for unit in rest]
            room -= budget.window + sum(stay)
        if room < 0:
            raise _too_small(budget, sum(stay))
        for size, part in zip(sizes, stay, strict=True):
            room -= size - part
            if room < 0:
                break
            tiers.append(budget.tier)
    if len(tiers) < len(units):
        raise _no_place(units, units[len(tiers) :], budgets)
    return TierPlan(tuple(units), tuple(budgets), tuple(tiers))


def _too_small(budget: Budget, stays: int) -> DeepSpeedConfigError:
    key = f"memory.{budget.tier}"
    needs = [f"{size_text(budget.window)} there for what is on its way to and from slower memory"] * bool(budget.window)
    needs += [f"{size_text(stays)} there for what cannot lie in slower memory"] * bool(stays)
    return DeepSpeedConfigError(
        f"{key}: a rank may use {size_text(budget.limit or 0)} of it, but needs {' and '.join(needs)}. Raise {key}.",
        path=key,
    )


def _no_place(units: Sequence[StateUnit], left: Sequence[StateUnit], budgets: Sequence[Budget]) -> DeepSpeedConfigError:
    """What was needed, what there is, and what lacks."""
    kinds: dict[str, int] = {}
    for unit in units:
        for part in unit.parts:
            kinds[part.kind] = kinds.get(part.kind, 0) + part.nbytes
    whole, missing = (size_text(sum(unit.nbytes for unit in some)) for some in (units, left))
    needed = ", ".join(f"{size_text(nbytes)} of {kind}" for kind, nbytes in kinds.items())
    given = ", ".join(f"{budget.tier} {size_text(budget.limit or 0)}" for budget in budgets) or "nothing"
    last = budgets[-1].tier if budgets else DEVICE
    advice = f"Raise memory.{last} by as much for each rank of a machine"
    if last != DISK:
        advice += ", give memory.disk and memory.path"
    return DeepSpeedConfigError(
        f"memory: a rank holds {whole} of states ({needed}) and may use {given}: {missing} find no place, from "
        f"{left[0].name!r} ({size_text(left[0].nbytes)}) on. {advice}, or train on more ranks.",
        path="memory",
    )


PARAMETERS, MASTERS, MOMENTS, GRADIENTS = "parameters", "masters", "moments", "gradients"
TILE = 1 << 25
"""Elements that are updated at a time, unless a config says otherwise."""
_ON_THE_WAY = 3  # tiles that are read, updated and written at a time
_ONE_EACH = Widths(1, 1, 1, 1)

Sizes = Sequence[int | tuple[str, int]]
"""Numbers of elements, or names with them."""


def plan_states(
    groups: Sequence[Sizes],
    spread: Spread,
    section: MemoryConfig,
    *,
    ranks: int = 1,
    widths: Widths = Widths(),
    frozen: Sizes = (),
    tile: int = TILE,
) -> TierPlan:
    """Where the states of parameters with these numbers of elements would live, with `ranks` ranks on a machine.

    `groups` and `frozen` are those of `model_states`; `tile` is how many elements are updated at a time.
    """
    if tile < 1:
        raise UsageError(f"tile is {tile}; expected a number of elements above zero")
    named = [_named(group, f"parameter {{}} of group {place}") for place, group in enumerate(groups)]
    others = _named(frozen, "frozen parameter {}")
    elements = model_states([_numels(group) for group in named], spread, widths=_ONE_EACH, frozen=_numels(others))
    together = _at_home(elements, widths)
    if section.device is None or together.nbytes <= section.device:
        return place([together], budgets_of(section, ranks=ranks))
    parameters = list(_parameters(elements, [*chain.from_iterable(named), *others], spread, widths))
    if spread.stage < 3 and parameters[0].nbytes > section.device:
        raise DeepSpeedConfigError(
            f"memory.device: {size_text(section.device)} are less than the {size_text(parameters[0].nbytes)} that "
            f"stage {spread.stage} keeps whole on every device. Raise it, or use stage 3, which shards parameters.",
            path="memory.device",
        )
    pieces = list(_pieces(named, spread, widths))
    largest = max((part.elements for unit in pieces for part in unit.parts), default=0)
    away = (widths.master or widths.param) + widths.optimizer  # bytes of an element that is not on the device
    window = _ON_THE_WAY * max(min(tile, elements.optimizer), largest) * away
    return place([*parameters, *pieces], budgets_of(section, ranks=ranks, windows={HOST: math.ceil(window)}))


def _named(sizes: Sizes, pattern: str) -> list[tuple[str, int]]:
    return [size if isinstance(size, tuple) else (pattern.format(place), size) for place, size in enumerate(sizes)]


def _numels(group: Sequence[tuple[str, int]]) -> list[int]:
    return [numel for _, numel in group]


def _at_home(elements: ModelStates, widths: Widths) -> StateUnit:
    """All of it as one unit, for a device that holds it."""
    roles = [
        (PARAMETERS, elements.params, widths.param),
        (MASTERS, elements.masters, widths.master),
        (MOMENTS, elements.optimizer, widths.optimizer),
        (GRADIENTS, elements.grads, widths.grad),
    ]
    return StateUnit("all states", tuple(StatePart(*role) for role in roles if role[2]))


def _parameters(
    elements: ModelStates, everything: Sequence[tuple[str, int]], spread: Spread, widths: Widths
) -> Iterator[StateUnit]:
    """Whole on the device below stage 3; there chunks, beside what stays whole."""
    if spread.stage < 3:
        yield StateUnit("whole parameters", (StatePart(PARAMETERS, elements.params, widths.param),))
        return
    lasting = [-(-numel // spread.world) * spread.world for _, numel in everything if numel <= spread.persistent]
    if lasting:
        # whatever a budget says: the error that there is no room for them is about the device
        part = StatePart("whole parameters", sum(lasting), widths.param, slowest=DEVICE)
        yield StateUnit("parameters that stay whole", (part,))
    for name, numel in everything:
        yield StateUnit(name, (StatePart(PARAMETERS, -(-numel // spread.world), widths.param),))


def _pieces(groups: Sequence[Sequence[tuple[str, int]]], spread: Spread, widths: Widths) -> Iterator[StateUnit]:
    """What the optimizer of this rank updates of each parameter."""
    for group in groups:
        for (name, _), count in zip(group, fragments(_numels(group), spread), strict=True):
            if count:
                master = StatePart(
                    MASTERS, count, widths.master or widths.param, fastest=DEVICE if widths.master else HOST
                )
                gradient = StatePart(GRADIENTS, count, widths.grad, slowest=HOST)
                yield StateUnit(name, (master, StatePart(MOMENTS, count, widths.optimizer), gradient))


_HEAD = ("tier", "states", "elements", "bytes", "of the budget")
_LEFT = 2  # columns of words


def plan_lines(plan: TierPlan) -> list[str]:
    """The table as text with columns side by side."""
    table = [_HEAD, *_cells(plan)]
    widths = [max(len(row[column]) for row in table) for column in range(len(_HEAD))]
    return [
        "  ".join(
            cell.ljust(width) if column < _LEFT else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def show(plan: TierPlan, file: TextIO | None = None, *, title: str = "Where the model states of a rank live") -> None:
    """Print the table to standard output or to `file`; in colours only where that is a terminal."""
    out = sys.stdout if file is None else file
    if not out.isatty():
        out.write("\n".join([title, *plan_lines(plan)]) + "\n")
        return
    from rich.console import Console  # slow to import, and of no use without a terminal
    from rich.table import Table

    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for column, name in enumerate(_HEAD):
        table.add_column(name, justify="left" if column < _LEFT else "right", no_wrap=True)
    rows = _cells(plan)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        table.add_row(*row, end_section=following is not None and following[0] != row[0])
    Console(file=out).print(table)


def _cells(plan: TierPlan) -> list[tuple[str, ...]]:
    """A row of text for each kind in each tier, and one for the whole of every tier that has a limit."""
    rows: list[tuple[str, ...]] = []
    for budget in plan.budgets:
        held = [row for row in plan.rows if row.tier == budget.tier]
        for row in held:
            share = "no limit" if row.share is None else f"{row.share:.1%}"
            rows.append((row.tier, row.kind, f"{row.elements:,}" if row.elements else "", size_text(row.nbytes), share))
        if budget.limit is not None:
            nbytes = sum(row.nbytes for row in held)
            share = f"{nbytes / budget.limit:.1%} of {size_text(budget.limit)}" if budget.limit else "0 B"
            rows.append((budget.tier, "all", "", size_text(nbytes), share))
    return rows
