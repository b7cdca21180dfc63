"""Traces of several ranks become one, on one clock."""

from __future__ import annotations

import json

from deepspeed.profiling.trace import MERGED, main, shaped


def raw(base):
    told = {"Device Type": 0, "Total Allocated": 9}
    return {
        "baseTimeNanoseconds": base,
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "args": {"name": "python"}},
            {"ph": "X", "name": "aten::mm", "pid": 77, "tid": 1, "ts": 5.0, "dur": 2.0},
            {"ph": "s", "name": "flow", "id": 4, "pid": 77, "tid": 1, "ts": 5.0},
            {"ph": "i", "name": "[memory]", "pid": 77, "tid": 1, "ts": 6.0, "args": told},
        ],
    }


def test_joined_by_the_command(tmp_path, capsys):
    for rank, base in enumerate((1_000_000, 3_000_000)):
        trace = shaped(raw(base), rank, [(base + 7000, {"moments": 8})])
        (tmp_path / f"trace.rank{rank:05d}.json").write_text(json.dumps(trace))
    assert main([str(tmp_path)]) == 0
    events = json.loads((tmp_path / MERGED).read_text())["traceEvents"]
    products = [(each["pid"], each["ts"]) for each in events if each.get("name") == "aten::mm"]
    assert products == [(0, 5.0), (1000, 2005.0)]
    curves = [(each["name"], each["ts"], each["args"]) for each in events if each.get("ph") == "C"]
    assert curves == [
        *(("memory of the host", 6.0, {"allocated": 9}), ("memory by kind", 7.0, {"moments": 8})),
        *(("memory of the host", 2006.0, {"allocated": 9}), ("memory by kind", 2007.0, {"moments": 8})),
    ]
    assert {each["id"] for each in events if "id" in each} == {"0.4", "1.4"}
    assert {each["args"]["name"] for each in events if each.get("ph") == "M"} >= {"rank 0: python", "rank 1: python"}
    assert main([str(tmp_path / "none")]) == 2
    assert "usage" in capsys.readouterr().err
