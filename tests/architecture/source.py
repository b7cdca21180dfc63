"""The package's sources, parsed once, for the tests of taste."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from deepspeed._package import without_collection

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "deepspeed"


@functools.cache
def files() -> tuple[Path, ...]:
    """Every Python file of the package."""
    return tuple(sorted(PACKAGE.rglob("*.py")))


@functools.cache
def tree(path: Path) -> ast.Module:
    with without_collection():
        return ast.parse(path.read_text(encoding="utf-8"), str(path))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))
