"""What fits where, before a job: the exact states of a rank, placed by budgets; no processes, no tensors.

    plan = plan_states([numels], Spread(stage=3, world=8), MemoryConfig(device="20GB", host="200GB"), ranks=8)
    show(plan)

Parameters come first, since every micro step uses them; then the states of a step, tile by tile. Below stage 3 whole
parameters stay on the device, and so do the whole gradients of stages 0 and 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deepspeed.config.memory import MemoryConfig, size_text
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.memory.budget import DEVICE, Part, Plan, Unit, budgets_of, place
from deepspeed.memory.states import ModelStates, Spread, Widths, model_states

__all__ = ["plan_states", "units_of"]

_ONE_EACH = Widths(1, 1, 1, 1)
_TILE = 100_000_000


def units_of(elements: ModelStates, spread: Spread, widths: Widths, tile: int = _TILE) -> list[Unit]:
    """What a rank holds, most used first; `elements` counts each role, `tile` is how many of them a unit has."""
    if tile < 1:
        raise UsageError(f"tile is {tile}; expected a number of elements above zero")
    params = ("parameters", elements.params, widths.param)
    grads = ("gradients", elements.grads, widths.grad)
    states = [("masters", elements.masters, widths.master), ("moments", elements.optimizer, widths.optimizer)]
    sharded = spread.world > 1 and spread.stage > 1
    if spread.stage == 3:
        return [*_cut("block", [params], tile), *_cut("tile", [*states, grads], tile)]
    whole = [params] if sharded else [params, grads]
    first = Unit("what every pass needs whole", tuple(Part(*part) for part in whole if part[2]))
    return [first, *_cut("tile", [*states, grads] if sharded else states, tile)]


def plan_states(
    groups: Sequence[Sequence[int]],
    spread: Spread,
    section: MemoryConfig,
    *,
    ranks: int = 1,
    widths: Widths = Widths(),
    frozen: Sequence[int] = (),
    tile: int = _TILE,
) -> Plan:
    """Where the states of parameters with these numbers of elements would live, with `ranks` ranks on a machine.

    `groups` and `frozen` are those of `model_states`.
    """
    elements = model_states(groups, spread, widths=_ONE_EACH, frozen=frozen)
    plan = place(units_of(elements, spread, widths, tile), budgets_of(section, ranks=ranks))
    if spread.stage < 3 and plan.tiers[0] != DEVICE:
        raise DeepSpeedConfigError(
            f"memory.device: {size_text(section.device or 0)} are less than the {size_text(plan.units[0].nbytes)} that "
            f"stage {spread.stage} keeps whole on every device. Raise it, or use stage 3, which shards parameters.",
            path="memory.device",
        )
    return plan


def _cut(name: str, parts: Sequence[tuple[str, int, int]], tile: int) -> Iterator[Unit]:
    """Units of `tile` elements of each part; a part of no width is nothing."""
    parts = [part for part in parts if part[2]]
    longest = max((count for _, count, _ in parts), default=0)
    for number, start in enumerate(range(0, longest, tile)):
        held = [(kind, min(tile, count - start), width) for kind, count, width in parts if count > start]
        yield Unit(f"{name} {number}", tuple(Part(*part) for part in held))
