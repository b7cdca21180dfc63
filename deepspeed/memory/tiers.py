"""What fits where, before a job: the exact states of a rank, placed by budgets; no processes, no tensors.

    plan = plan_states([numels], Spread(stage=3, world=8), MemoryConfig(device="20GB", host="200GB"), ranks=8)
    show(plan)

What moves is what a rank holds of one parameter. Parameters come first, since every micro step uses them; then the
states of a step. Below stage 3 whole parameters stay on the device. Gradients go with the states of their parameter, as
far as host memory; only while everything is on the device they are whole at stage 1, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain

from deepspeed.config.memory import MemoryConfig, size_text
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.memory.budget import DEVICE, HOST, Part, Plan, Unit, budgets_of, place
from deepspeed.memory.states import ModelStates, Spread, Widths, fragments, model_states

__all__ = ["GRADIENTS", "MASTERS", "MOMENTS", "PARAMETERS", "TILE", "plan_states"]

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
) -> Plan:
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
    window = _ON_THE_WAY * max(min(tile, elements.optimizer), largest) * _away_width(widths)
    return place([*parameters, *pieces], budgets_of(section, ranks=ranks, windows={HOST: math.ceil(window)}))


def _named(sizes: Sizes, pattern: str) -> list[tuple[str, int]]:
    return [size if isinstance(size, tuple) else (pattern.format(place), size) for place, size in enumerate(sizes)]


def _numels(group: Sequence[tuple[str, int]]) -> list[int]:
    return [numel for _, numel in group]


def _away_width(widths: Widths) -> float:
    """Bytes of masters and moments together, per element that is not on the device."""
    return (widths.master or widths.param) + widths.optimizer


def _at_home(elements: ModelStates, widths: Widths) -> Unit:
    """All of it as one unit, for a device that holds it."""
    roles = [
        (PARAMETERS, elements.params, widths.param),
        (MASTERS, elements.masters, widths.master),
        (MOMENTS, elements.optimizer, widths.optimizer),
        (GRADIENTS, elements.grads, widths.grad),
    ]
    return Unit("all states", tuple(Part(*role) for role in roles if role[2]))


def _parameters(
    elements: ModelStates, everything: Sequence[tuple[str, int]], spread: Spread, widths: Widths
) -> Iterator[Unit]:
    """Whole on the device below stage 3; there chunks, beside what stays whole."""
    if spread.stage < 3:
        yield Unit("whole parameters", (Part(PARAMETERS, elements.params, widths.param),))
        return
    lasting = [-(-numel // spread.world) * spread.world for _, numel in everything if numel <= spread.persistent]
    if lasting:
        # whatever a budget says: the error that there is no room for them is about the device
        part = Part("whole parameters", sum(lasting), widths.param, slowest=DEVICE)
        yield Unit("parameters that stay whole", (part,))
    for name, numel in everything:
        yield Unit(name, (Part(PARAMETERS, -(-numel // spread.world), widths.param),))


def _pieces(groups: Sequence[Sequence[tuple[str, int]]], spread: Spread, widths: Widths) -> Iterator[Unit]:
    """What the optimizer of this rank updates of each parameter."""
    for group in groups:
        for (name, _), count in zip(group, fragments(_numels(group), spread), strict=True):
            if count:
                master = Part(MASTERS, count, widths.master or widths.param, fastest=DEVICE if widths.master else HOST)
                gradient = Part(GRADIENTS, count, widths.grad, slowest=HOST)
                yield Unit(name, (master, Part(MOMENTS, count, widths.optimizer), gradient))
