"""`ds_report --hostfile F`: the reports of all hosts, and what differs between them."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.console import Console
from rich.text import Text

from deepspeed.launcher.backends.ssh import ssh_words
from deepspeed.launcher.console import emit, plain_table
from deepspeed.launcher.ds_ssh import hosts_of
from deepspeed.launcher.errors import MISTAKE, LaunchError, option_words
from deepspeed.printable import printable

__all__ = ["ask_hosts", "differences", "shown_facts"]

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
        emit(json.dumps({host: _plain(answer) for host, answer in answers.items()}, indent=2) + "\n")
    else:
        emit(lambda console: _draw(answers, console))
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


def _plain(answer: dict[str, Any] | str) -> dict[str, Any]:
    return {"error": answer} if isinstance(answer, str) else answer


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
    for warning, hosts in _warnings(reports).items():
        console.print(Text(f"! {_few(hosts)}: {printable(warning)}", style="yellow"))


def _warnings(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    told: dict[str, list[str]] = {}
    for host, report in reports.items():
        for warning in report.get("warnings") or []:
            told.setdefault(str(warning), []).append(host)
    return told


def _few(hosts: Sequence[str]) -> str:
    return ", ".join(hosts) if len(hosts) <= 4 else f"{', '.join(hosts[:3])}, … ({len(hosts)} hosts)"
