"""`ds_plan`: what a script with a config needs on so many ranks, whether it fits, and what to change."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deepspeed.comm.init import shorten
from deepspeed.config.memory import read_size, size_text
from deepspeed.config.read import read
from deepspeed.errors import DeepSpeedError, UsageError
from deepspeed.io.ds_io import count
from deepspeed.launcher.arguments import HelpFormatter
from deepspeed.launcher.console import emit, plain_table
from deepspeed.planning.ceilings import DEVICES, as_json, device_of, measure
from deepspeed.planning.changes import Proposal, least_ranks, proposals
from deepspeed.planning.page import page
from deepspeed.planning.planner import FRAGMENTATION, Cluster, Plan, plan_model
from deepspeed.planning.sources import ModelSource
from deepspeed.planning.trace import PlannedModel, quiet


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="ds_plan",
        description="What a training needs, without running it: memory of a rank by kind, bytes on links, time of a "
        "step, and changes that fit. Needs no device, no data and no weights. Status 1: it does not fit.",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", nargs="?", help="a script, module:function, or a config.json of Transformers")
    parser.add_argument("config", nargs="?", help="the JSON config")
    job = parser.add_argument_group("job").add_argument
    job("--world", type=count, default=None, help="ranks; the nodes times the ranks of one, or 1, if not given")
    job("--nodes", type=count, default=None, help="nodes; --world divided by --per-node if not given")
    job("--per-node", type=count, default=8, help="ranks of a node")
    job("--batch", type=count, default=None, help="samples of a micro batch, where the config leaves it open")
    job("--sequence", type=count, default=None, help="tokens of a sample")
    device = parser.add_argument_group("device").add_argument
    device(
        "--device", default=None, help=f"{', '.join(DEVICES)}; or JSON of --measure; links of ds_bench: h200,links.json"
    )
    device(
        "--memory", type=_size, default=None, help="bytes that a rank may use, such as 79GiB; the device's if not given"
    )
    device(
        "--measure", metavar="FILE", default=None, help="measure this machine's device for some seconds, and write FILE"
    )
    result = parser.add_argument_group("result").add_argument
    result("--json", action="store_true", help="print one JSON object")
    result("--html", type=Path, default=None, metavar="FILE", help="write a page with pictures")
    result("--advise", action="store_true", help="propose changes even if it fits")
    result("--fit", type=Path, default=None, metavar="FILE", help="write the config of the fastest proposal that fits")
    args = parser.parse_args(argv)
    if args.measure is None and (args.model is None or args.config is None):
        parser.error("expected a model and a config, such as: ds_plan model.py ds.json --world 64 --device h200")
    if args.nodes is not None and args.world not in (None, args.nodes * args.per_node):
        parser.error(
            f"--world {args.world} is not --nodes {args.nodes} times --per-node {args.per_node}; leave one out"
        )
    for option in ("measure", "html", "fit"):  # before the plan is made, which takes its time
        file = getattr(args, option)
        if file is not None and not Path(file).absolute().parent.is_dir():
            parser.error(f"--{option} {file}: there is no folder {Path(file).absolute().parent}; make it first")
    return args


def _size(text: str) -> int:
    try:
        size = read_size(int(text) if text.isdigit() else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not size:
        raise argparse.ArgumentTypeError("found 0; a rank needs more than 0 bytes of its device")
    return size


def main(argv: Sequence[str] | None = None) -> int:
    """Plan and print; 0: it fits or no memory was named, 1: it does not fit, 2: it cannot be planned."""
    args = parse(argv)
    try:
        if args.measure is not None:
            Path(args.measure).write_text(as_json(measure()), encoding="utf-8")
            if args.model is None:
                emit(f"{args.measure}\n")
                return 0
        return _run(args)
    except (DeepSpeedError, OSError) as error:
        sys.stderr.write(f"ds_plan: error: {error}\n")
    except Exception as error:  # noqa: BLE001 - of the model, whose frames say where
        shorten(error)
        traceback.print_exception(error)
        said = "; ".join(str(error).splitlines())
        sys.stderr.write(f"ds_plan: error: a step of {args.model} failed: {type(error).__name__}: {said}\n")
    return 2


def _run(args: argparse.Namespace) -> int:
    named = args.device or args.measure
    device = None if named is None else device_of(named)
    world = args.world or (args.nodes or 0) * args.per_node or 1
    cluster = Cluster(world, args.per_node, device, args.memory)
    if (args.advise or args.fit is not None) and cluster.limit is None:
        raise UsageError("changes that fit are asked for, and no memory is named; add --device or --memory")
    source = ModelSource(args.model)
    given = read(args.config).values
    model = PlannedModel(source, quiet(given), source.example, args.batch, args.sequence)
    found = plan_model(model, cluster)
    advice = proposals(model, found) if found.fits is False or args.advise else []
    fewest = least_ranks(model, found) if found.fits is False and not advice else None
    if args.html is not None:
        args.html.write_text(page(found), encoding="utf-8")
    if args.json:
        shown = {**found.to_json(), "proposals": [_plain(each) for each in advice], "least_ranks": fewest}
        emit(json.dumps(shown, indent=2) + "\n")
    else:
        emit(partial(draw, plan=found))
        emit("".join(f"{line}\n" for line in _advice(found, advice, fewest)))
    if args.fit is not None:
        _write_fit(args.fit, given, found, advice)
    return 1 if found.fits is False else 0


def _plain(each: Proposal) -> dict[str, object]:
    return {
        "change": each.change.text,
        "code": each.change.code,
        "peak": each.plan.peak,
        "seconds": each.slower,
        "config": each.change.config,
    }


def _advice(found: Plan, advice: Sequence[Proposal], fewest: int | None) -> list[str]:
    if advice:
        lines = ["changes that fit, the fastest first:"]
        for each in advice:
            time = "" if each.slower is None else f", a step of {each.slower * 1e3:.2f} ms"
            lines.append(f"  {each.change.text}: peak {size_text(each.plan.peak)}{time}")
        return lines
    if found.fits is not False:
        return []
    if fewest is None:
        return ["no change of the config fits, on as many ranks as the batch has samples"]
    return [
        f"no change of the config fits; with stage 3 and everything offloaded {fewest} ranks are the fewest that do"
    ]


def _write_fit(file: Path, given: dict[str, object], found: Plan, advice: Sequence[Proposal]) -> None:
    """The given config with what the fastest proposal changes; as it is where it fits already."""
    if found.fits:
        made = given
    else:
        best = next((each for each in advice if not each.change.code), None) or next(iter(advice), None)
        if best is None:
            sys.stderr.write(f"ds_plan: {file} is not written: no change of the config fits\n")
            return
        watches = {key: value for key, value in given.items() if key not in found.config}
        made = {**best.change.config, **watches}
        if best.change.code:
            sys.stderr.write(f"ds_plan: {file} fits with this line in the script: {best.change.code}\n")
    file.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")


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
    if time.timeline is not None:
        table.add_row("waiting for stages", "", "", "", _milliseconds(time.bubble))
        name = f"bubble of {time.timeline.schedule.name}, all stages"
        table.add_row(name, "", "", "", f"{time.timeline.bubble:.1%}")
    table.add_row("step", "", "", f"MFU {time.utilization:.0%}", _milliseconds(time.total))
    for name, seconds in time.largest:
        table.add_row(f"largest: {name}", "", "", "", _milliseconds(seconds))
    return table


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
