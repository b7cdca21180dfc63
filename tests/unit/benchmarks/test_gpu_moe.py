"""The script about one layer of experts, as far as it goes without a device."""

from __future__ import annotations

import json

from benchmarks.gpu_moe import main, table
from tests.harness import ranks


def test_the_table_compares_with_the_dense_layer_and_shows_failures():
    rows = [
        {"contender": "ours", "experts": 8, "ms": 15.0, "gib": 3.0},
        {"contender": "dense", "experts": 8, "ms": 10.0, "gib": 1.0},
        {"contender": "transformers", "experts": 8, "error": "ImportError: no"},
    ]
    lines = table(rows)
    assert "15.00     1.50      3.00   target 15 ms" in lines[1]
    assert lines[3].endswith("transformers     failed: ImportError: no")


@ranks(1, init=False)
def test_it_runs(tmp_path):
    sizes = ["--hidden", "32", "--inner", "32", "--tokens", "16", "--steps", "1", "--warm-up", "0", "--experts", "2"]
    options = ["--device", "cpu", "--only", "dense,ours,ours:capacity", "--json", str(tmp_path / "rows")]
    assert main([*sizes, *options]) == 0
    assert [row["contender"] for row in json.loads((tmp_path / "rows").read_text())] == [
        "dense",
        "ours",
        "ours:capacity",
    ]
