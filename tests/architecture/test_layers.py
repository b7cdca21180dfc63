"""An import points downwards, and there are no cycles: the contract of .importlinter, run as a test."""

from __future__ import annotations

import subprocess
import sys

import grimp
import pytest

from tests.architecture.source import ROOT


def test_the_layer_contract_holds():
    result = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def graph():
    return grimp.build_graph(
        "deepspeed", include_external_packages=True, exclude_type_checking_imports=True, cache_dir=None
    )


def test_no_import_cycle(graph):
    """Depth-first over what the modules of the package import when they run."""
    edges = {
        module: sorted(
            target for target in graph.find_modules_directly_imported_by(module) if target.startswith("deepspeed")
        )
        for module in graph.modules
        if module.startswith("deepspeed")
    }
    done, path = set(), []

    def visit(module):
        if module in path:
            pytest.fail("import cycle: " + " → ".join([*path[path.index(module) :], module]))
        if module in done:
            return
        path.append(module)
        for target in edges.get(module, ()):
            visit(target)
        path.pop()
        done.add(module)

    for module in sorted(edges):
        visit(module)


def test_layer_zero_is_free_of_torch(graph):
    """`python -m deepspeed.config check` and the schema need no tensor library; the published `DtypeEnum` does."""
    for module in graph.modules - {"deepspeed.config.inference"}:
        if module.startswith(("deepspeed.config", "deepspeed.errors", "deepspeed.events", "deepspeed.log")):
            assert not graph.direct_import_exists(importer=module, imported="torch"), module


def test_the_engine_uses_zero_by_its_interface(graph):
    """`zero/interface.py` is the seam; names that are imported past it stay few."""
    inside = [
        (found["importer"], found["imported"])
        for module in graph.modules
        if module.startswith("deepspeed.runtime")
        for imported in graph.find_modules_directly_imported_by(module)
        if imported.startswith("deepspeed.zero.") and imported != "deepspeed.zero.interface"
        for found in graph.get_import_details(importer=module, imported=imported)
    ]
    assert len(inside) <= 10, inside


def test_the_construction_of_an_engine_asks_for_no_class_of_models(graph):
    """What differs for a pipeline are methods of `PipelineKind`."""
    for module in ("deepspeed._api", "deepspeed._assemble", "deepspeed._assemble.observers"):
        assert not graph.direct_import_exists(importer=module, imported="deepspeed.pipe.module"), module
