"""A plan as text on a console."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from deepspeed.config.memory import size_text
from deepspeed.launcher.console import plain_table
from deepspeed.planning.planner import FRAGMENTATION, Plan

_MOST = 14  # rows of collectives


def draw(console: Console, plan: Plan) -> None:
    """Memory, bytes on links, time, and what was assumed."""
    largest = plan.largest
    train, micro, steps = largest.batch
    axes = ", ".join(f"{name} {size}" for name, size in largest.axes.items())
    stage = f", stage {largest.stage} of {largest.stages}" if largest.stages > 1 else ""
    tokens = f" of {largest.sequence} tokens" if largest.sequence else ""
    console.print(
        f"{plan.cluster.world} ranks{f' ({axes})' if axes else ''}, {plan.cluster.per_node} per node; batch {train} = "
        f"{micro} samples{tokens} x {steps} micro steps x {train // (micro * steps)} replicas",
        highlight=False,
    )
    module = "" if largest.peak.module is None else f", module {largest.peak.module or 'the model'}"
    console.print(f"rank {largest.place.rank}{stage} holds most: in {largest.peak.phase}{module}\n", highlight=False)
    console.print(_memory(plan), highlight=False)
    if plan.collectives:
        console.print(_links(plan), highlight=False)
    if plan.time is not None:
        console.print(_time(plan), highlight=False)
    for text in plan.assumed:
        console.print(f"assumed: {text}", highlight=False)


def _numbers(*columns: str) -> Table:
    table = plain_table(*columns)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _memory(plan: Plan) -> Table:
    table = _numbers("memory of the device", "bytes", "of the peak")
    for kind, nbytes in plan.kinds.items():
        if nbytes or kind != FRAGMENTATION:
            table.add_row(kind, size_text(nbytes), f"{nbytes / plan.peak:.1%}")
    table.add_row("peak", size_text(plan.peak), "")
    if plan.cluster.limit is not None:
        left = plan.cluster.limit - plan.peak
        said = f"fits, {size_text(left)} left" if plan.fits else f"does not fit, {size_text(-left)} too much"
        table.add_row("memory", size_text(plan.cluster.limit), said)
    for kind, nbytes in plan.largest.host.items():
        table.add_row(f"host: {kind}", size_text(nbytes), "")
    return table


def _links(plan: Plan) -> Table:
    table = _numbers("sent in a step", "axis", "phase", "times", "message", "within nodes", "between nodes")
    rows = sorted(plan.collectives, key=lambda each: -each.count * each.links.total)
    for each in rows[:_MOST]:
        sizes = (each.size, each.count * each.links.within, each.count * each.links.between)
        table.add_row(each.op, each.axis, each.phase, str(each.count), *(size_text(round(size)) for size in sizes))
    if len(rows) > _MOST:
        table.add_row(f"{len(rows) - _MOST} more", "", "", "", "", "", "")
    links = plan.links
    table.add_row("all", "", "", "", "", size_text(round(links.within)), size_text(round(links.between)))
    return table


def _time(plan: Plan) -> Table:
    time = plan.time
    assert time is not None, "shown with a device only"
    table = _numbers("time of a step", "computes", "sends", "exposed", "all")
    for phase in time.phases:
        table.add_row(phase.phase, *map(_milliseconds, (phase.computes, phase.sends, phase.exposed, phase.total)))
    if time.bubble:
        table.add_row("waiting for stages", "", "", "", _milliseconds(time.bubble))
    table.add_row("step", "", "", f"MFU {time.utilization:.0%}", _milliseconds(time.total))
    for name, seconds in time.largest:
        table.add_row(f"largest: {name}", "", "", "", _milliseconds(seconds))
    return table


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
