"""The table of collectives, also where one process runs the example alone."""

from __future__ import annotations

import contextlib
import io
import runpy

import pytest

from tests.harness import ROOT, ranks


@ranks(1, init=False)
def test_one_process_alone():
    pytest.importorskip("rich")
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        runpy.run_path(str(ROOT / "examples" / "collectives.py"), run_name="__main__")
    assert "1 ranks, backend gloo" in shown.getvalue()
    assert "all_to_all_single" in shown.getvalue()
    assert "batch_isend_irecv" not in shown.getvalue()
