"""`--sample` leaves out what tests/full.txt names, and knows its rows whatever `-k` chooses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests import sampling


def collected(*names):
    config = SimpleNamespace(
        args=["tests"],
        getoption=lambda option: option == "--sample",
        hook=SimpleNamespace(pytest_deselected=lambda items: None),
    )
    return config, [SimpleNamespace(nodeid=name, config=config) for name in names]


@pytest.fixture
def _one_row(tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "LEFT_OUT", tmp_path / "full.txt")
    sampling.LEFT_OUT.write_text("# a comment\ntests/a.py::long\n")


@pytest.mark.usefixtures("_one_row")
@pytest.mark.parametrize(("deselected", "left"), [(None, ["short", "other"]), ("long", ["short", "other"])])
def test_what_a_row_names_is_left_out(deselected, left):
    config, items = collected("tests/a.py::long", "tests/a.py::short", "tests/a.py::other")
    hook = sampling.pytest_collection_modifyitems(config, items)
    next(hook)
    items[:] = [item for item in items if not item.nodeid.endswith(f"::{deselected}")]  # as `-k` does
    with pytest.raises(StopIteration):
        next(hook)
    assert [item.nodeid for item in items] == [f"tests/a.py::{name}" for name in left]


@pytest.mark.usefixtures("_one_row")
def test_a_row_that_names_no_test_is_an_error():
    hook = sampling.pytest_collection_modifyitems(*collected("tests/a.py::short"))
    with pytest.raises(pytest.UsageError, match=r"names tests that do not exist: tests/a\.py::long"):
        next(hook)
