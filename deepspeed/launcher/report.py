"""`ds_report`: what this machine offers to training, as tables or JSON; of several hosts, what differs between them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from deepspeed.errors import printable
from deepspeed.launcher.console import emit, plain_table
from deepspeed.launcher.ds_ssh import add_hosts, hosts_of
from deepspeed.launcher.errors import MISTAKE, LaunchError, option_words
from deepspeed.launcher.facts import (
    AcceleratorFacts,
    HostFacts,
    Interface,
    SharedMemory,
    SystemFeature,
    SystemReport,
    Tool,
    gather,
    gibibytes,
)
from deepspeed.launcher.multi_host import ssh_words
from deepspeed.ops.registry import Explanation, State

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


def _without_complaints(report: SystemReport) -> SystemReport:
    def quiet(findings: Iterable[SystemFeature]) -> tuple[SystemFeature, ...]:
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


def render(report: SystemReport, console: Console) -> None:
    for title, body in _sections(report):
        console.print(Text(title, style="bold cyan"))
        console.print(Padding(body, (0, 0, 1, 2), expand=False), highlight=False)


def _sections(report: SystemReport) -> Iterable[tuple[str, RenderableType]]:
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


def _machine(machine: HostFacts, shared: SharedMemory | None) -> Table:
    size = None if shared is None else f"{shared.path}: {gibibytes(shared.total)}, {gibibytes(shared.free)} free"
    return _pairs(
        {
            "system": machine.system,
            "processor": machine.processor,
            "usable cores": str(machine.cores),
            "vector instructions": ", ".join(machine.vector_instructions) or None,
            "memory": None if machine.memory is None else gibibytes(machine.memory),
            "shared memory": size,
            **{each.name: _answer(each) for each in machine.storage},
        }
    )


def _answer(finding: SystemFeature) -> str:
    return ", ".join(filter(None, ("yes" if finding.available else "no", finding.reason)))


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


# ---- several hosts

_PATIENCE = 120  # seconds for a host to answer
_AT_ONCE = 64


def ask_hosts(args: argparse.Namespace) -> int:
    """Ask every host for its report, print the comparison, and return 1 if one did not answer."""
    try:
        hosts, given = hosts_of(args), option_words("ssh_args", args.ssh_args)
    except LaunchError as error:
        sys.stderr.write(f"ds_report: error: {error}\n")
        return MISTAKE
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = dict(zip(hosts, pool.map(lambda host: _ask(host, args.ssh_port, given), hosts), strict=True))
    if args.json:
        shown = {host: {"error": each} if isinstance(each, str) else each for host, each in answers.items()}
        emit(json.dumps(shown, indent=2) + "\n")
    else:
        emit(partial(_draw, answers))
    return int(any(isinstance(answer, str) for answer in answers.values()))


def _ask(host: str, port: int | None, given: Sequence[str]) -> dict[str, Any] | str:
    """A host's report, or why there is none."""
    paths = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
    program = shlex.join([f"PYTHONPATH={paths}", sys.executable, "-m", "deepspeed.env_report", "--json"])
    command = [*ssh_words(host, port, given), f"exec env {program}"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_PATIENCE} s"
    except OSError as error:
        return f"ssh cannot be run: {error}"
    if done.returncode != 0:
        told = done.stderr.strip().splitlines() or ["nothing was said"]
        return f"exit code {done.returncode}: {told[-1]}"
    try:
        found = json.loads(done.stdout)
    except ValueError:
        return f"it answered {done.stdout!r:.100}, which is no report"
    return found if isinstance(found, dict) else "it answered no report"


def shown_facts(report: Mapping[str, Any]) -> dict[str, str]:
    """The facts of a report that should be equal on all hosts of a job, as text."""
    facts = {name: str(value) for name, value in _walk("", report) if not name.startswith(("ops.", "interfaces."))}
    accelerator = report.get("accelerator") or {}
    devices = [str(each.get("name")) for each in accelerator.get("devices") or []]
    facts["accelerator.devices"] = ", ".join(f"{devices.count(name)} × {name}" for name in dict.fromkeys(devices))
    for line in report.get("ops") or []:
        if line.get("state") == "chosen":
            facts[f"op {line.get('op')}"] = str(line.get("implementation"))
    return facts


def _walk(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Dotted names of values; lists of objects, and what differs from moment to moment, are left out."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _walk(f"{prefix}.{key}" if prefix else str(key), inner)
    elif isinstance(value, list):
        if not any(isinstance(inner, dict) for inner in value):
            yield prefix, ", ".join(map(str, value)) or "-"
    elif prefix.endswith(("memory", "memory.total")) and isinstance(value, int):
        yield prefix, f"{value / 2**30:.0f} GiB"
    elif prefix != "shared_memory.free":
        yield prefix, "-" if value is None else value


def differences(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """Fact → value → the hosts that have it, for facts that not all hosts share."""
    facts = {host: shown_facts(report) for host, report in reports.items()}
    names = dict.fromkeys(name for own in facts.values() for name in own)
    found: dict[str, dict[str, list[str]]] = {}
    for name in names:
        values: dict[str, list[str]] = {}
        for host, own in facts.items():
            values.setdefault(own.get(name, "-"), []).append(host)
        if len(values) > 1:
            found[name] = values
    return found


def _draw(answers: Mapping[str, dict[str, Any] | str], console: Console) -> None:
    reports = {host: answer for host, answer in answers.items() if not isinstance(answer, str)}
    found = differences(reports)
    silent = {host: answer for host, answer in answers.items() if isinstance(answer, str)}
    table = plain_table("fact", "value", "hosts")
    for name, values in found.items():
        for number, (value, hosts) in enumerate(sorted(values.items(), key=lambda each: -len(each[1]))):
            table.add_row("" if number else printable(name), printable(value), _few(hosts))
    if found:
        console.print(table)
    elif reports:
        console.print(Text(f"{len(reports)} hosts answered, and nothing differs between them", style="green"))
    for host, why in silent.items():
        console.print(Text(f"{host}: {printable(why)}", style="yellow"))
    warned: dict[str, list[str]] = {}
    for host, report in reports.items():
        for warning in report.get("warnings") or []:
            warned.setdefault(str(warning), []).append(host)
    for warning, hosts in warned.items():
        console.print(Text(f"! {_few(hosts)}: {printable(warning)}", style="yellow"))


def _few(hosts: Sequence[str]) -> str:
    return ", ".join(hosts) if len(hosts) <= 4 else f"{', '.join(hosts[:3])}, … ({len(hosts)} hosts)"
