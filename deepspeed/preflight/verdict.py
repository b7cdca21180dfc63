"""The verdict: every finding as a table for people or as JSON, and the exit status that follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from deepspeed.launcher.console import plain_table
from deepspeed.preflight.finding import Finding, Level, counted
from deepspeed.printable import printable

__all__ = ["Verdict"]

_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}
_MOST = 12
"""Findings of one check that the table shows; JSON has all."""


@dataclass(frozen=True)
class Verdict:
    """What a preflight found."""

    ranks: int
    hosts: tuple[str, ...]
    findings: Mapping[str, Sequence[Finding]]
    """Check → what it says."""
    seconds: float = 0.0

    def count(self, level: Level) -> int:
        """How many findings have this level."""
        return sum(finding.level is level for own in self.findings.values() for finding in own)

    @property
    def status(self) -> int:
        """The exit status: 0 unless there is a problem; warnings do not fail."""
        return int(self.count(Level.PROBLEM) > 0)

    @property
    def line(self) -> str:
        """The verdict in one line."""
        warnings = self.count(Level.WARNING)
        warned = f", {counted(warnings, 'warning')}" if warnings else ""
        made = f"{counted(len(self.findings), 'check')} on {counted(self.ranks, 'rank')} in {self.seconds:.1f} s"
        problems = self.count(Level.PROBLEM)
        return f"NOT READY: {counted(problems, 'problem')}{warned} ({made})" if problems else f"READY{warned} ({made})"

    def as_json(self) -> dict[str, Any]:
        """Everything."""
        return {
            "ready": self.status == 0,
            "ranks": self.ranks,
            "hosts": list(self.hosts),
            "seconds": round(self.seconds, 3),
            "checks": {name: [asdict(finding) for finding in own] for name, own in self.findings.items()},
        }

    def draw(self, console: Console) -> None:
        """The table, what to do, and the verdict as its last line."""
        table = plain_table("check", "", "found")
        for name, own in self.findings.items():
            ordered = sorted(own, key=lambda finding: list(Level).index(finding.level), reverse=True)
            for number, finding in enumerate(ordered[:_MOST]):
                state = Text(finding.level.value, style=_STYLES[finding.level])
                table.add_row("" if number else name, state, printable(finding.what))
            if len(ordered) > _MOST:
                table.add_row("", "", f"… and {len(ordered) - _MOST} more; --json has them")
        console.print(table, highlight=False)
        acts: dict[str, Level] = {}
        for name, own in self.findings.items():
            for finding in own:
                if finding.advice and finding.level is not Level.OK:
                    act = f"{name}: {finding.advice}"
                    acts[act] = Level.PROBLEM if Level.PROBLEM in (acts.get(act), finding.level) else Level.WARNING
        if acts:
            console.print()
            console.print(Text("What to do", style="bold cyan"))
            grid = plain_table()
            grid.show_header = False
            grid.add_column()
            grid.add_column(overflow="fold")
            for act, level in sorted(acts.items(), key=lambda item: item[1] is not Level.PROBLEM):
                grid.add_row(Text("!" if level is Level.PROBLEM else "-", style=_STYLES[level]), printable(act))
            console.print(grid, highlight=False)
        console.print()
        console.print(Text(self.line, style=_STYLES[Level.PROBLEM if self.status else Level.OK]))
