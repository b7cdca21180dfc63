"""The code: every host would run the same script, the same modules beside it, and the same copy of this package."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deepspeed.preflight.check import Check, Here
from deepspeed.preflight.finding import Finding, Level, Told, among, counted, odd_ones, who
from deepspeed.preflight.program import code_of, digest_of

__all__ = ["Code", "CodeFact"]

_MOST = 5


@dataclass(frozen=True, slots=True)
class CodeFact:
    """Digests as a rank sees the files; `files` only of the first rank of a host."""

    name: str | None = None
    kind: str = "script"
    file: str | None = None
    script: str | None = None
    beside: str | None = None
    library: str | None = None
    files: dict[str, str] = field(default_factory=dict)


class Code(Check[CodeFact]):
    """The script exists on every host, and it and its modules are the same there."""

    name = "code"
    about = "the script, the Python files beside it, and this package are equal"
    fact = CodeFact

    def gather(self, here: Here) -> CodeFact:
        program = here.program
        file = program.file
        library = _together(code_of(Path(__file__).resolve().parents[2]))
        if file is None:
            return CodeFact(program.name, program.kind, library=library)
        files = {} if program.kind == "program" else code_of(file.absolute().parent)
        return CodeFact(
            program.name,
            program.kind,
            str(file),
            digest_of(file),
            _together(files),
            library,
            files if here.is_first else {},
        )

    def judge(self, told: Sequence[Told[CodeFact]]) -> list[Finding]:
        found = list(
            _other(told, "library", "another copy of the package deepspeed", "install the same one everywhere")
        )
        first = told[0].fact
        if first.name is None:
            return [*found, Finding(Level.WARNING, "no script was given", advice="give the script and its arguments")]
        absent = [each for each in told if each.fact.file is None]
        if absent:
            what = f"there is no {first.kind} {first.name} for {who(absent)}"
            ranks = tuple(each.rank for each in absent)
            found.append(Finding(Level.PROBLEM, what, ranks, "put it there; a shared file system is the usual way"))
        found += _other(told, "script", f"another {first.name}", "copy the script again")
        if not any(finding.level is Level.PROBLEM for finding in found):
            found += _other(told, "beside", "other Python files beside the script", "copy them again", Level.WARNING)
        if found:
            return found
        beside = f", with {counted(len(first.files), 'Python file')} in its folder" if first.files else ""
        return [Finding(Level.OK, f"{first.file}{beside}")]


def _together(files: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]


def _other(
    told: Sequence[Told[CodeFact]], field: str, what: str, advice: str, level: Level = Level.PROBLEM
) -> Iterator[Finding]:
    """A finding for each digest that few ranks have, with the names of the files that differ where they are known."""
    there = [each for each in told if getattr(each.fact, field) is not None]
    if not there:
        return
    usual, others = odd_ones({each.rank: getattr(each.fact, field) for each in there})
    model = next((each.fact.files for each in there if getattr(each.fact, field) == usual and each.fact.files), {})
    for value, ranks in others.items():
        some = among(there, ranks)
        files = next((each.fact.files for each in some if getattr(each.fact, field) == value and each.fact.files), {})
        names = sorted(name for name in {*model, *files} if model.get(name) != files.get(name))
        shown = (
            f": {', '.join(names[:_MOST])}{', …' if len(names) > _MOST else ''}" if names and field == "beside" else ""
        )
        yield Finding(level, f"{who(some)} {'has' if len(ranks) == 1 else 'have'} {what}{shown}", tuple(ranks), advice)
