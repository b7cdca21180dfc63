"""The picture in docs/architecture.md shows the layers of .importlinter, and imports between folders follow it.

The package has more than two hundred imports from folder to folder, too many to draw. So the picture has one box per
layer with a node per folder, and an arrow from each layer to the next one below. Two folders stand at the side; of
these every import is drawn.
"""

from __future__ import annotations

import ast
import configparser
import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE, ROOT, files, tree

ROOT_MODULE = "__init__"  # deepspeed/__init__.py imports on first use whatever a script asks for
UNLAYERED = {ROOT_MODULE, "_package"}
SIDE = "side"


@functools.cache
def picture() -> tuple[dict[str, list[str]], list[tuple[str, str]]]:
    """The boxes with their nodes, from top to bottom, and the arrows."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return parse(re.search(r"^```mermaid\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[1])


def parse(drawing: str) -> tuple[dict[str, list[str]], list[tuple[str, str]]]:
    boxes: dict[str, list[str]] = {}
    arrows: list[tuple[str, str]] = []
    box = None
    for line in filter(None, map(str.strip, re.split(r"[;\n]", drawing))):
        if found := re.match(r"subgraph (\w+)", line):
            box = boxes.setdefault(found[1], [])
        elif line == "end":
            box = None
        elif re.fullmatch(r"\w+( --> \w+)+", line):
            arrows += itertools.pairwise(line.split(" --> "))
        elif box is not None and re.fullmatch(r"\w+", line):
            box.append(line)
        elif not line.startswith("flowchart"):
            pytest.fail(f"docs/architecture.md: a line of the picture that this test cannot read: {line}")
    return boxes, arrows


def contract() -> tuple[list[str], set[tuple[str, str]]]:
    """The layers of .importlinter from top to bottom as they are written, and the imports that it lets pass."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / ".importlinter")
    section = parser["importlinter:contract:layers"]
    ignored = (line.split(" -> ") for line in section["ignore_imports"].strip().splitlines())
    return section["layers"].strip().splitlines(), {(top(one), top(other)) for one, other in ignored}


def top(module: str) -> str:
    """The folder, or the file in none, that a module belongs to."""
    return module.split(".")[1]


def members(layer: str) -> list[str]:
    """The folders and files of a layer that exist."""
    return [name for name in re.findall(r"deepspeed\.(\w+)", layer) if name in parts()]


@functools.cache
def parts() -> set[str]:
    """Every folder of the package, and every file in none."""
    return {place(path) for path in files()}


def place(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """The modules of the package that a file imports, anywhere in it."""
    package = [PACKAGE.name, *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


@functools.cache
def edges() -> dict[tuple[str, str], str]:
    """(folder, folder that it imports) → a file that does so."""
    found: dict[tuple[str, str], str] = {}
    for path in files():
        for module in imported(path):
            names = module.split(".")
            if names[0] == PACKAGE.name and len(names) > 1 and names[1] in parts() and names[1] != place(path):
                found.setdefault((place(path), names[1]), str(path.relative_to(ROOT)))
    return found


def layers() -> list[list[str]]:
    return [nodes for box, nodes in picture()[0].items() if box != SIDE]


def test_every_folder_is_drawn_once():
    drawn = [node for nodes in picture()[0].values() for node in nodes]
    assert sorted(drawn) == sorted(set(drawn)), "a folder is drawn twice"
    folders = parts() - UNLAYERED
    assert folders - set(drawn) == set(), "in deepspeed/, but not in the picture"
    assert set(drawn) - folders == set(), "in the picture, but not in deepspeed/"


def test_the_layers_are_those_of_the_contract():
    expected = [sorted(found) for layer in contract()[0] if (found := members(layer))]
    assert [sorted(nodes) for nodes in layers()] == expected


def test_each_layer_points_to_the_next():
    boxes, arrows = picture()
    rows = [box for box in boxes if box != SIDE]
    between = [arrow for arrow in arrows if set(arrow) <= set(rows)]
    assert between == list(itertools.pairwise(rows))


def test_no_import_points_upwards():
    height = {node: number for number, nodes in enumerate(layers()) for node in nodes}
    apart = {name for layer in contract()[0] if "|" in layer for name in members(layer)}  # import none of their layer
    wrong = []
    for (user, used), file in sorted(edges().items()):
        if user not in height or used not in height or (user, used) in contract()[1]:
            continue
        if height[user] > height[used] or (height[user] == height[used] and user in apart):
            wrong.append(f"{file}: deepspeed.{user} may not import deepspeed.{used}")
    assert wrong == []


def test_the_arrows_at_the_side_are_the_imports():
    boxes, arrows = picture()
    side = set(boxes[SIDE])
    drawn = {arrow for arrow in arrows if arrow[1] in side}
    real = {edge for edge in edges() if edge[1] in side and edge[0] not in side}
    assert drawn - real == set(), "drawn, but no such import"
    assert real - drawn == set(), "imports that are not drawn"
    ((_, highest),) = [arrow for arrow in arrows if arrow[0] == SIDE]
    rows = [box for box in boxes if box != SIDE]
    below = {node for box in rows[rows.index(highest) :] for node in boxes[box]} | side | UNLAYERED
    assert [f"{user} -> {used}" for user, used in sorted(edges()) if user in side and used not in below] == []


def test_a_drawing_is_read():
    boxes, arrows = parse('flowchart TB\n subgraph a["A"]; x; y; end\n subgraph b["B"]\n z\n end\n a --> b --> z\n')
    assert boxes == {"a": ["x", "y"], "b": ["z"]}
    assert arrows == [("a", "b"), ("b", "z")]
