"""Which tier holds which states: a pure function from what a rank has to hold and what it may use to a plan.

    budgets = budgets_of(schema.memory, ranks=ranks_on_this_machine)   # the fastest tier first
    plan = place(units, budgets)                                       # or a DeepSpeedConfigError that says what lacks
    plan.tiers[i]                                                      # where units[i] lives
    show(plan)                                                         # of deepspeed.memory.plan_table

A `Unit` is what moves together: the masters, moments and gradients of a tile, or the parameters of a block at stage 3;
its parts say so by kind. Units are given in the order in which they should get fast memory, such as parameters, which
every micro step uses twice, before optimizer states, which a step uses once. Each tier takes the next units for as long
as they fit, so that a tier holds one run of that order: with more of a budget no unit moves to a slower tier.

A part may have tiers of its own: gradients of what is on the disk wait in host memory, and a master that is the
parameter itself takes memory only where the parameter is not. A budget may keep a window back: bytes that a tier needs,
once anything lies in a slower one, for what is on its way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from deepspeed.config.memory import MemoryConfig, size_text
from deepspeed.errors import DeepSpeedConfigError, UsageError

__all__ = ["DEVICE", "DISK", "HOST", "Budget", "Part", "Plan", "Row", "Unit", "budgets_of", "place"]

DEVICE, HOST, DISK = "device", "host", "disk"
"""Names of the tiers, which are the keys of the config's `memory` section."""

_ORDER = (DEVICE, HOST, DISK)

_NO_WINDOWS: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Part:
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
class Unit:
    """What is in one tier as a whole."""

    name: str
    parts: tuple[Part, ...]

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
class Row:
    """What a tier holds of one kind; `share` is its part of the budget, None where there is no limit."""

    tier: str
    kind: str
    elements: int
    nbytes: int
    share: float | None


@dataclass(frozen=True)
class Plan:
    """Where every unit lives."""

    units: tuple[Unit, ...]
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

    def _parts_in(self, tier: str) -> list[Part]:
        placed = zip(self.units, self.tiers, strict=True)
        return [part for unit, at in placed for part in unit.parts if part.lies_in(at) == tier]

    @property
    def rows(self) -> list[Row]:
        """Tier by tier, kinds in the order of the units, then the window that is kept back."""
        found: list[Row] = []
        for at, budget in enumerate(self.budgets):
            kinds: dict[str, tuple[int, int]] = {}
            for part in self._parts_in(budget.tier):
                elements, nbytes = kinds.get(part.kind, (0, 0))
                kinds[part.kind] = (elements + part.elements, nbytes + part.nbytes)
            if budget.window and any(slower.tier in self.tiers for slower in self.budgets[at + 1 :]):
                kinds["on the way"] = (0, budget.window)
            for kind, (elements, nbytes) in kinds.items():
                found.append(Row(budget.tier, kind, elements, nbytes, _share(nbytes, budget.limit)))
        return found


def budgets_of(
    section: MemoryConfig, *, ranks: int = 1, windows: Mapping[str, int] = _NO_WINDOWS
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
    return tuple(Budget(tier, limit, windows.get(tier, 0)) for tier, limit in limits.items())


def place(units: Sequence[Unit], budgets: Sequence[Budget]) -> Plan:
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
    return Plan(tuple(units), tuple(budgets), tuple(tiers))


def _share(nbytes: int, limit: int | None) -> float | None:
    if limit is None:
        return None
    return nbytes / limit if limit else 0.0


def _too_small(budget: Budget, stays: int) -> DeepSpeedConfigError:
    key = f"memory.{budget.tier}"
    needs = [f"{size_text(budget.window)} there for what is on its way to and from slower memory"] * bool(budget.window)
    needs += [f"{size_text(stays)} there for what cannot lie in slower memory"] * bool(stays)
    return DeepSpeedConfigError(
        f"{key}: a rank may use {size_text(budget.limit or 0)} of it, but needs {' and '.join(needs)}. Raise {key}.",
        path=key,
    )


def _no_place(units: Sequence[Unit], left: Sequence[Unit], budgets: Sequence[Budget]) -> DeepSpeedConfigError:
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
