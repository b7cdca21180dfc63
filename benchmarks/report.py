"""Shows a run as tables for people and writes it as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.summary import CaseSummary, Row, number

__all__ = ["Report", "show", "table", "write"]

TITLES = {"ours": "ours", "deepspeed": "DeepSpeed", "torch": "PyTorch"}


@dataclass(frozen=True)
class Report:
    """A whole run: how it was started, on what, and what came out."""

    command: str
    rounds: int | None
    machine: Mapping[str, str | int | float]
    contenders: Mapping[str, Mapping[str, str]]  # name → versions
    missing: Mapping[str, str]  # name → why
    cases: tuple[CaseSummary, ...]

    def as_json(self) -> dict[str, object]:
        return {
            "command": self.command,
            "rounds": self.rounds,
            "machine": dict(self.machine),
            "contenders": {name: dict(versions) for name, versions in self.contenders.items()},
            "missing": dict(self.missing),
            "cases": [case.as_json() for case in self.cases],
        }


def heading(name: str, contenders: Mapping[str, Mapping[str, str]]) -> str:
    """A contender's column title: its name, flavour, and version."""
    home, _, flavour = name.partition(":")
    versions = contenders.get(home, {})
    version = versions.get("torch" if home == "torch" else "deepspeed", "")
    return " ".join(part for part in (TITLES.get(home, home), f"({flavour})" if flavour else "", version) if part)


def _cell(row: Row, name: str, failures: Mapping[str, str]) -> Text:
    if name in failures:
        return Text("failed", style="red")
    found = row.figures.get(name)
    if found is None:
        return Text("–", style="dim")
    unit = "" if row.unit in ("", "modules") else f" {row.unit}"
    return Text(f"{number(found.median)} ± {number(found.spread)}{unit}")


def _ratio(row: Row, name: str) -> Text:
    ratio = row.ratios.get(name)
    if ratio is None:
        return Text("–", style="dim")
    better = ratio <= 1 if row.better == "lower" else ratio >= 1
    return Text(f"{number(ratio)}×", style="green" if better else "yellow")


def _targets(row: Row) -> Text:
    words = {True: ("met", "green"), False: ("NOT MET", "bold red"), None: ("not measured", "dim")}
    text = Text()
    for position, verdict in enumerate(row.verdicts):
        word, style = words[verdict.met]
        text.append("\n" if position else "").append(f"{verdict.statement} ").append(word, style=style)
    return text


def table(case: CaseSummary, contenders: Mapping[str, Mapping[str, str]]) -> Table:
    """One case: a row per measure and setting; median ± half the interquartile range, and ours ÷ theirs."""
    others = [name for name in case.contenders if name != "ours"] if "ours" in case.contenders else []
    has_targets = any(row.verdicts for setting in case.settings for row in setting.rows)
    shown = Table(title=f"{case.name}: {case.title}", title_justify="left", title_style="bold")
    shown.add_column("measure", no_wrap=True)
    for name in case.contenders:
        shown.add_column(heading(name, contenders), justify="right")
    for name in others:
        shown.add_column(f"ours ÷ {heading(name, {})}", justify="right")
    if has_targets:
        shown.add_column("target for ours", no_wrap=True)
    for setting in case.settings:
        if len(case.settings) > 1:
            shown.add_section()
            shown.add_row(Text(setting.label, style="italic"))
        for row in setting.rows:
            if not row.figures and not setting.failures:
                continue  # nobody has anything to report here
            cells = [Text(row.title), *(_cell(row, name, setting.failures) for name in case.contenders)]
            cells += [_ratio(row, name) for name in others]
            shown.add_row(*cells, *([_targets(row)] if has_targets else []))
    return shown


def show(report: Report, console: Console) -> None:
    """Everything, for a person."""
    machine = report.machine
    devices = sorted({versions["device"] for versions in report.contenders.values() if "device" in versions})
    console.print(
        f"{machine['cores']} cores of {machine['cpu']} ({machine['architecture']}), {machine['memory_gib']} GiB, "
        f"{machine['system']}, Python {machine['python']}, device {', '.join(devices) or 'unknown'}",
        highlight=False,
    )
    console.print(f"$ {report.command}", highlight=False, markup=False)
    torches = {versions.get("torch", "?") for versions in report.contenders.values()}
    if len(torches) > 1:
        console.print(f"Beware: the contenders run on different torch versions: {', '.join(sorted(torches))}.")
    for name, reason in report.missing.items():
        console.print(f"{TITLES.get(name, name)} is left out: {reason}", style="yellow", markup=False)
    for case in report.cases:
        console.print()
        console.print(table(case, report.contenders))
        for setting in case.settings:
            for name, reason in setting.failures.items():
                console.print(f"{name} failed ({setting.label}): {reason}", style="red", markup=False)


def write(report: Report, file: Path) -> None:
    """Write the JSON."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report.as_json(), indent=2, ensure_ascii=False) + "\n")
