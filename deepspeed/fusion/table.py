"""What was replaced and what was not, as people read it."""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed.fusion.find import Finding
from deepspeed.fusion.swap import Swap

__all__ = ["lines"]

_HEAD = ("kind", "module", "count", "first of them", "now computed by")


def lines(findings: Sequence[Finding]) -> list[str]:
    """A row for each kind of module and what became of it, in columns."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.kind, finding.module, _fate(finding)), []).append(finding)
    rows = [_HEAD]
    rows += [(kind, module, str(len(held)), held[0].name, fate) for (kind, module, fate), held in groups.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _fate(finding: Finding) -> str:
    if isinstance(finding.result, Swap):
        return finding.result.kernel
    return f"itself: {finding.result.reason}"
