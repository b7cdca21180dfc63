"""The pages people read, taken apart: fenced blocks, code within lines, and the commands in both.

A comment right before a block says how it is tried, if not as its language is:

    <!-- tried: on 32 pretended ranks -->
    <!-- tried: tests/clients/test_openai_client.py -->
    <!-- not tried: it installs packages -->
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.harness import ROOT

OUTER = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md"]
DOCS = [  # what `make docs` generates is no page of ours
    *sorted(path.name for path in (ROOT / "docs").glob("*.md")),
    *sorted(f"architecture/{path.name}" for path in (ROOT / "docs" / "architecture").glob("*.md")),
]
PAGES = [*OUTER, *(f"docs/{page}" for page in DOCS)]
PROGRAMS = (
    "accelerate",
    "deepspeed",
    "ds_bench",
    "ds_io",
    "ds_nvme_tune",
    "ds_plan",
    "ds_report",
    "ds_serve",
    "make",
    "pip",
    "python",
    "python3",
    "torchrun",
    "pytest",
)

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\s*$")
_NOTE = re.compile(r"^ *<!-- (?P<kind>tried|not tried): (?P<text>.+) -->\s*$")
_INLINE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Block:
    """A fenced block; `tried` and `skipped` are the words of the comment before it."""

    page: str
    line: int
    language: str
    text: str
    tried: str = ""
    skipped: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One command, and what the page shows of its output where it shows some."""

    block: Block
    words: tuple[str, ...]
    output: str = ""

    def __str__(self) -> str:
        return f"{self.block}: {shlex.join(self.words)}"


@cache
def blocks(page: str) -> tuple[Block, ...]:
    """Every fenced block of a page."""
    return tuple(_blocks(page))


def _blocks(page: str) -> Iterator[Block]:
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        opening = _FENCE.match(lines[number])
        if opening is None:
            number += 1
            continue
        start = number
        number += 1
        while lines[number].strip() != "```":
            number += 1
        indent = len(opening["indent"])
        body = "\n".join(line[indent:] for line in lines[start + 1 : number]) + "\n"
        note = _NOTE.match(lines[start - 1]) if start else None
        words = {"tried" if note["kind"] == "tried" else "skipped": note["text"]} if note else {}
        yield Block(page, start + 1, opening["language"], body, **words)
        number += 1


def prose(page: str) -> str:
    """The page without its blocks."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.sub(r"^ *```.*?^ *```\s*$", "", text, flags=re.MULTILINE | re.DOTALL)


def inline(page: str) -> list[str]:
    """Code within the lines of a page; of a table's cells too."""
    return [" ".join(code.split()) for code in _INLINE.findall(prose(page))]


def of_language(language: str) -> list[Block]:
    """The blocks of all pages in a language, those that are not tried left out."""
    return [block for page in PAGES for block in blocks(page) if block.language == language and not block.skipped]


def commands(block: Block) -> Iterator[Command]:
    """The commands of a console block: all lines, or those after `$ `, which are then followed by their output."""
    lines = block.text.splitlines()
    prompted = any(line.startswith("$ ") for line in lines)
    for number, line in enumerate(lines):
        if prompted and not line.startswith("$ "):
            continue
        output = ""
        for later in lines[number + 1 :] if prompted else ():
            if later.startswith("$ "):
                break
            output += later + "\n"
        for words in alternatives(shlex.split(line.removeprefix("$ "), comments=True)):
            yield Command(block, words, output.strip())


def alternatives(words: list[str]) -> Iterator[tuple[str, ...]]:
    """`--to a|b` is two commands."""
    if not words:
        return
    for number, word in enumerate(words):
        if "|" in word:
            for choice in word.split("|"):
                yield from alternatives([*words[:number], choice, *words[number + 1 :]])
            return
    yield tuple(words)


def all_commands() -> list[Command]:
    """Every command of every page, in blocks and in lines."""
    found = [command for block in of_language("console") for command in commands(block)]
    for page in PAGES:
        for code in inline(page):
            first, _, rest = code.partition(" ")
            if first in PROGRAMS and rest and "..." not in rest:
                block = Block(page, 0, "inline", code)
                found += [Command(block, complete(words)) for words in alternatives(shlex.split(code))]
    return found


def complete(words: tuple[str, ...]) -> tuple[str, ...]:
    """`python -m deepspeed.config check` in a sentence names a tool: that it is there, its help tells."""
    return (*words, "--help") if words[:2] == ("python", "-m") and len(words) < 5 else words


def runs(command: Command) -> str:
    """The script, module or program that a command runs."""
    words = [Path(command.words[0]).name, *command.words[1:]]
    if words[0] in ("python", "python3"):
        return words[2] if words[1] == "-m" else words[1]
    return words[0]
