"""The reader of files of events: growing, put aside, torn and hostile ones."""

from __future__ import annotations

import json
import os

import pytest

from deepspeed.monitor.event_file import LONGEST, EventFile
from deepspeed.run_page.reader import Cursor, RankReader, RunColumns, RunFiles, find_runs, runs_of
from tests.run_files import HOSTILE, write_run


def kinds(records):
    return [each["kind"] for each in records]


def test_what_a_writer_writes_is_read_over_files_that_were_put_aside(tmp_path):
    file = EventFile(tmp_path / "run", 0, {"world": 1}, limit=3000, keep=100)
    for step in range(1, 101):
        file.tell("step", step=step, loss=float("nan") if step == 7 else 1.0 / step, ms={"forward": 2.0})
    file.close()
    assert len(list(tmp_path.iterdir())) > 3
    reader = RankReader(file.path)
    records, cursor = reader.read()
    steps = [each["step"] for each in records if each["kind"] == "step"]
    assert steps == list(range(1, 101))
    assert reader.read(cursor) == ([], cursor)
    found, begin = [], Cursor()
    while True:  # in pieces, as a stream takes them
        piece, after = reader.read(begin, 500)
        if not piece:
            break
        found += piece
        begin = Cursor.parse(str(after))
    assert found == records
    columns = RunColumns().add(records)
    assert columns.columns["loss"][5:8] == [1 / 6, None, 1 / 8]
    assert [each["text"] for each in columns.marks if each["kind"] == "loss"] == ["loss is NaN"]
    assert columns.phases["forward"] == [2.0] * 100
    assert len([each for each in columns.marks if each["kind"] == "start"]) == 1, "a file put aside is no start"


def test_a_torn_line_is_read_once_it_is_whole(tmp_path):
    path = tmp_path / "run.rank00000.jsonl"
    path.write_bytes(b'{"kind":"a"}\n{"kind":')
    reader = RankReader(path)
    records, cursor = reader.read()
    assert kinds(records) == ["a"]
    with path.open("ab") as file:
        file.write(b'"b"}\n')
    records, cursor = reader.read(cursor)
    assert kinds(records) == ["b"]
    path.write_bytes(b'{"kind":"new"}\n')
    assert kinds(reader.read(cursor)[0]) == ["new"], "a file that became shorter is read anew"


def test_hostile_lines_are_left_out(tmp_path):
    path = tmp_path / "run.rank00000.jsonl"
    lines = [
        *(b'{"kind":"' + b"x" * (10 << 20) + b'"}', b"[" * 100_000, b'{"kind":3}', b"\xff\xfe", b"[]", b"null"),
        b'{"kind":"step","step":1,"loss":NaN,"norm":1e999,"lr":"x","ms":[1],"comm":[{"bytes":"y","op":{}},4],"memory":7}',
        b'{"kind":"step","step":' + b"9" * 5000 + b"}",
        b'{"kind":"step","step":true}',
        b'{"kind":"experts","layers":{"a":7,"b":[1,"x"]}}',
        json.dumps({"kind": "hang", "text": HOSTILE + "\u202e", "step": 2}).encode(),
        b'{"kind":"' + b"y" * (LONGEST - 20) + b'"}',
        b'{"kind":"last"}',
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    records, _ = RankReader(path).read()
    assert kinds(records)[-1] == "last"
    columns = RunColumns().add(records)
    assert columns.columns["step"] == [1]
    assert (columns.columns["loss"], columns.columns["norm"], columns.columns["lr"]) == ([None], [None], [None])
    assert "\x1b" not in columns.marks[0]["text"]
    assert "\u202e" not in columns.marks[0]["text"]
    assert max(len(each["text"]) for each in columns.marks) <= 500
    json.loads(json.dumps(columns.as_dict(), allow_nan=False))


def test_only_regular_files_of_the_folder_are_runs(tmp_path):
    write_run(tmp_path / "in", "one", 10, ranks=2)
    os.mkfifo(tmp_path / "in" / "pipe.rank00000.jsonl")
    (tmp_path / "outside.jsonl").write_text('{"kind":"secret"}\n')
    (tmp_path / "in" / "link.rank00000.jsonl").symlink_to(tmp_path / "outside.jsonl")
    (tmp_path / "in" / "other.txt").write_text("")
    assert {name: list(files) for name, files in find_runs(tmp_path / "in").items()} == {"one": [0, 1]}


def test_lanes_show_the_slow_rank(tmp_path):
    write_run(tmp_path, "run", 30, ranks=9)
    (run,) = runs_of([tmp_path])
    lanes = run.lanes(steps=8)
    assert (lanes["steps"], lanes["ranks"]) == (list(range(23, 31)), list(range(9)))
    busy = [sum(lane) / len(lane) for lane in lanes["lanes"]]
    assert busy.index(max(busy)) == 7
    assert RunFiles("x", {3: tmp_path / "run.rank00003.jsonl"}).read()["columns"]["step"][-1] == 30


@pytest.mark.parametrize("text", ["", "x", "1", "1:2:3", "-1:0", "1:" + "9" * 30, "٣:١"])
def test_cursors_that_are_none_begin_anew(text):
    assert Cursor.parse(text) == Cursor()
