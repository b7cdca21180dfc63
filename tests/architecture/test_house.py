"""The weight and the order of the package: lines per folder, names that occur once, no crumbs of files."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import tomllib

from deepspeed.published.old_paths import MOVED, SPLIT
from tests.architecture.source import PACKAGE, files, name, tree

LINES = tomllib.loads((Path(__file__).parent / "lines.toml").read_text(encoding="utf-8"))
SMALL = 60
ROOT_FILES = 8

# a file under 60 lines with one user → why it is a file
REASONS: dict[str, str] = {
    "deepspeed/compile/inductor.py": "imported with inductor, which takes a while",
    **{
        f"deepspeed/compile/passes/{name}.py": "a published path"
        for name in (
            *("prefetch", "selective_gather", "zero1_compile", "zero2_compile", "zero3_compile"),
            *("offload_activation", "offload_adam_states", "sp_compile"),
        )
    },
    "deepspeed/checkpoint/constants.py": "published names",
    "deepspeed/compile/passes/autotp_compile.py": "a pass has a file",
    "deepspeed/elasticity/tool.py": "the program ds_elastic",
    "deepspeed/env_report.py": "a program by its published path",
    "deepspeed/launcher/launcher_helper.py": "a program that starts without site-packages",
    "deepspeed/ops/spatial.py": "its builder imports it by name",
}


def folder(path: Path) -> str:
    """The part of the package that a file belongs to."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "."


def counted() -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for path in (*files(), *PACKAGE.rglob("*.cpp"), *PACKAGE.rglob("*.h"), *PACKAGE.rglob("*.cu")):
        found[folder(path)] += len(path.read_text(encoding="utf-8").splitlines())
    return dict(found)


def test_no_folder_outgrows_its_ceiling():
    found = counted()
    ceilings = LINES["folders"]
    over = {at: (lines, ceilings.get(at, 0)) for at, lines in found.items() if lines > ceilings.get(at, 0)}
    assert over == {}, "lines, ceiling: a ceiling of lines.toml is raised only for a feature that was asked for"
    assert set(ceilings) == set(found)
    assert sum(ceilings.values()) <= LINES["package"]


def test_the_root_holds_few_files():
    assert len([path for path in files() if folder(path) == "."]) <= ROOT_FILES


def test_no_public_class_name_occurs_twice():
    found = defaultdict(list)
    for path in files():
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(name(path))
    assert {what: where for what, where in found.items() if len(where) > 1} == {}


def imports(path: Path) -> set[tuple[str, str]]:
    """(module, name) of everything that a file imports from the package."""
    return {
        (node.module or "", alias.name)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "deepspeed"
        for alias in node.names
    }


def test_a_small_file_has_two_users_or_a_reason():
    users: dict[str, set[str]] = defaultdict(set)
    for path in files():
        for module, what in imports(path):
            users[module].add(name(path))
            users[f"{module}.{what}"].add(name(path))
    published = {*MOVED.values(), *(home.split(":")[0] for names in SPLIT.values() for home in names.values())}
    alone = set()
    for path in files():
        module = name(path).removesuffix(".py").replace("/", ".")
        lines = len(path.read_text(encoding="utf-8").splitlines())
        small = lines < SMALL and path.stem not in ("__init__", "__main__")
        if small and module not in published and len(users[module]) < 2:
            alone.add(name(path))
    assert alone - set(REASONS) == set(), "merge each into its only user, or give a reason"
    assert set(REASONS) - alone == set(), "these need no reason any more"
