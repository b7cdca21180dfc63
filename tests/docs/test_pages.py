"""Every page is listed where readers look for pages, and pages and messages are in plain words."""

from __future__ import annotations

import ast
import re

import pytest

from tests.docs.pages import DOCS, PAGES, prose
from tests.harness import ROOT

BANNED = ("is told", "are told", "knows nothing of", "whoever", "somebody", "nobody")
# How many stand in the strings of the package today. It may only fall.
CEILING_OF_THE_PACKAGE = 38

_BANNED = re.compile(rf"\b({'|'.join(BANNED)})\b", re.IGNORECASE)
LISTED = [page for page in DOCS if "/" not in page and page != "index.md"]
PARTS = [page for page in DOCS if "/" in page]  # of a page of the same name, which links them


def banned(text):
    return [found.group() for found in _BANNED.finditer(" ".join(text.split()))]


def strings(path):
    """The string literals of a module; docstrings are for its readers and left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented) and ast.get_docstring(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


@pytest.mark.parametrize("page", LISTED)
def test_the_index_lists_every_page(page):
    assert f"]({page})" in (ROOT / "docs" / "index.md").read_text()


@pytest.mark.parametrize("page", DOCS)
def test_the_navigation_lists_every_page(page):
    assert re.search(rf": {re.escape(page)}$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", LISTED)
def test_the_readme_links_every_page(page):
    assert f"](docs/{page})" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PARTS)
def test_a_page_links_its_parts(page):
    assert f"]({page})" in (ROOT / "docs" / f"{page.partition('/')[0]}.md").read_text()


@pytest.mark.parametrize("page", [*PAGES, "benchmarks/README.md"])
def test_pages_use_plain_words(page):
    assert banned(prose(page)) == []


def test_messages_use_plain_words():
    found = [
        f"{path.relative_to(ROOT)}: {text:.80}"
        for path in sorted((ROOT / "deepspeed").rglob("*.py"))
        for text in strings(path)
        if banned(text)
    ]
    assert len(found) <= CEILING_OF_THE_PACKAGE, "\n".join(found)
