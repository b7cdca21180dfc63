"""`ds_report`: what this machine offers to training, as tables for people or as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from deepspeed.launcher.console import emit, plain_table
from deepspeed.launcher.ds_ssh import add_hosts
from deepspeed.launcher.facts import AcceleratorFacts, Finding, Machine, Report, SharedMemory, Tool, gather, gibibytes
from deepspeed.launcher.network import Interface
from deepspeed.launcher.report_hosts import ask_hosts
from deepspeed.ops.registry import Explanation, State

__all__ = ["main", "render"]

_STATE_STYLE = {State.CHOSEN: "green", State.AVAILABLE: "", State.UNAVAILABLE: "dim", State.FAILED: "yellow"}


def main(argv: Sequence[str] | None = None) -> int:
    """Gather, print, and return 0 whatever was found; of several hosts, 1 if one did not answer."""
    arguments = _parser().parse_args(argv)
    if arguments.hostfile:
        return ask_hosts(arguments)
    report = gather()
    if arguments.hide_operator_status:
        report = dataclasses.replace(report, ops=())
    if arguments.hide_errors_and_warnings:
        report = _without_complaints(report)
    emit(json.dumps(dataclasses.asdict(report), indent=2) + "\n" if arguments.json else partial(render, report))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds_report", description="What this machine offers to training, and what it lacks."
    )
    parser.add_argument("--hide_operator_status", action="store_true", help="leave out the table of ops")
    parser.add_argument(
        "--hide_errors_and_warnings",
        action="store_true",
        help="leave out warnings, and the reasons why something is not available",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_hosts(parser.add_argument_group("other hosts: what differs between them, asked over ssh"), None)
    return parser


def _without_complaints(report: Report) -> Report:
    def quiet(findings: Iterable[Finding]) -> tuple[Finding, ...]:
        return tuple(each if each.available else dataclasses.replace(each, reason="") for each in findings)

    bad = (State.UNAVAILABLE, State.FAILED)
    accelerator = dataclasses.replace(report.accelerator, problem=None, candidates=quiet(report.accelerator.candidates))
    return dataclasses.replace(
        report,
        warnings=(),
        ops=tuple(dataclasses.replace(line, reason="") if line.state in bad else line for line in report.ops),
        accelerator=accelerator,
        machine=dataclasses.replace(report.machine, storage=quiet(report.machine.storage)),
    )


def render(report: Report, console: Console) -> None:
    """Print every section."""
    for title, body in _sections(report):
        console.print(Text(title, style="bold cyan"))
        console.print(Padding(body, (0, 0, 1, 2), expand=False), highlight=False)


def _sections(report: Report) -> Iterable[tuple[str, RenderableType]]:
    yield "Versions", _pairs(report.versions)
    yield "Installed at", _pairs(report.paths)
    yield "Machine", _machine(report.machine, report.shared_memory)
    yield "Accelerator", _accelerator(report.accelerator)
    if report.ops:
        yield "Ops", _ops(report.ops)
    yield "Build tools", _tools(report.build_tools)
    yield "Launchers", _tools(report.launchers)
    yield "Network", _network(report.interfaces, report.suggested_interface)
    yield "Environment", _pairs(report.environment) if report.environment else Text("nothing relevant is set")
    if report.warnings:
        yield "Warnings", _warnings(report.warnings)


def _pairs(facts: Mapping[str, str | None]) -> Table:
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(Text(name, style="dim"), Text("-", style="dim") if value is None else Text(value))
    return table


def _machine(machine: Machine, shared: SharedMemory | None) -> Table:
    size = None if shared is None else f"{shared.path}: {gibibytes(shared.total)}, {gibibytes(shared.free)} free"
    return _pairs(
        {
            "system": machine.system,
            "processor": machine.processor,
            "usable cores": None if machine.cores is None else str(machine.cores),
            "vector instructions": ", ".join(machine.vector_instructions) or None,
            "memory": None if machine.memory is None else gibibytes(machine.memory),
            "shared memory": size,
            **{each.name: _answer(each) for each in machine.storage},
        }
    )


def _answer(finding: Finding) -> str:
    answer = "yes" if finding.available else "no"
    return f"{answer}, {finding.reason}" if finding.reason else answer


def _accelerator(found: AcceleratorFacts) -> RenderableType:
    if found.name is None:
        parts: list[RenderableType] = [Text("none can be used", style="yellow")]
    else:
        parts = [Text(f"{found.name} is used, with {found.communication_backend} between ranks", style="green")]
    if found.devices:
        table = plain_table("device", "name", "memory", "compute capability")
        for device in found.devices:
            memory = "-" if device.memory is None else gibibytes(device.memory)
            table.add_row(str(device.index), device.name, memory, device.compute_capability or "-")
        parts.extend(["", table])
    others = [each for each in found.candidates if each.name != found.name]
    if others:
        table = plain_table("others", "available", "reason")
        for each in others:
            table.add_row(each.name, _yes(each.available), Text(each.reason, style="dim"))
        parts.extend(["", table])
    return Group(*parts)


def _yes(answer: bool | None) -> Text:
    if answer is None:
        return Text("unknown", style="dim")
    return Text("yes", style="green") if answer else Text("no", style="dim")


def _ops(lines: Iterable[Explanation]) -> Table:
    table = plain_table("op", "implementation", "state", "reason")
    last = None
    for line in lines:
        state = Text(line.state.value, style=_STATE_STYLE[line.state])
        table.add_row("" if line.op == last else line.op, line.implementation, state, Text(line.reason, style="dim"))
        last = line.op
    return table


def _tools(tools: Iterable[Tool]) -> Table:
    table = plain_table("program", "found at", "version")
    for tool in tools:
        table.add_row(tool.name, tool.path or Text("not found", style="dim"), tool.version or "")
    return table


def _network(found: Sequence[Interface], suggested: str | None) -> RenderableType:
    if not found:
        return Text("no interface was found")
    table = plain_table("interface", "up", "speed", "addresses")
    for each in found:
        speed = "-" if each.speed_mbit is None else f"{each.speed_mbit / 1000:g} Gb/s"
        table.add_row(each.name, _yes(each.up), speed, "\n".join(each.addresses) or "-")
    if suggested is None:
        return table
    hint = "If ranks on several machines do not find each other, name the interface that joins them:"
    setting = f"NCCL_SOCKET_IFNAME={suggested} GLOO_SOCKET_IFNAME={suggested}"
    return Group(table, "", Text(hint, style="dim"), Text(setting))


def _warnings(warnings: Iterable[str]) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    for warning in warnings:
        table.add_row(Text("!", style="bold yellow"), Text(warning, style="yellow", overflow="fold"))
    return table
