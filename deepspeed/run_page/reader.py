"""Reads files of events, whoever wrote them: lines that are torn, too long or no JSON are left out.

[Note: untrusted files] A file may be growing, truncated, replaced or hostile. A reader takes whole lines of at most
`LONGEST` bytes, regular files only, and turns numbers that are not finite into None, so that what it gives is JSON.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed.monitor.event_file import LONGEST
from deepspeed.trust import open_regular

_NAME = re.compile(r"(?P<run>[^/]+)\.rank(?P<rank>\d{5})\.jsonl")
_BLOCK = 1 << 20
_TEXT = 500
_MOST_NAMES = 64
_LARGEST = 10**300
COLUMNS = ("step", "t", "loss", "norm", "lr", "scale", "wall_ms", "tokens", "samples")
PHASES = ("forward", "backward", "backward_inner", "backward_allreduce", "step")
MEMORY = ("allocated", "max_allocated", "reserved", "host")


class Cursor(NamedTuple):
    """Where a reader goes on: the file, by its number among those put aside, and the byte in it."""

    part: int = 0
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.part}:{self.offset}"

    @staticmethod
    def parse(text: str) -> Cursor:
        """The cursor of such a text; the beginning for any other."""
        found = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,15})", text)
        return Cursor(int(found[1]), int(found[2])) if found else Cursor()


def find_runs(folder: Path) -> dict[str, dict[int, Path]]:
    """The current file of each rank, by run: engines of one process have files of different names."""
    runs: dict[str, dict[int, Path]] = {}
    for path in sorted(folder.iterdir()):
        if (found := _NAME.fullmatch(path.name)) and path.is_file() and not path.is_symlink():
            runs.setdefault(found["run"], {})[int(found["rank"])] = path
    return runs


class RankReader:
    """The records of one rank from a cursor on, over all files of it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, cursor: Cursor = Cursor(), limit: int | None = None) -> tuple[list[dict[str, Any]], Cursor]:
        """Records after the cursor, about `limit` bytes of them, and where the next ones begin."""
        records: list[dict[str, Any]] = []
        left = math.inf if limit is None else limit
        for part, path in self._parts():
            if part < cursor.part or left <= 0:
                continue
            begin = cursor.offset if part == cursor.part else 0
            try:
                end = _read_lines(path, begin, left, records.append)
            except OSError:  # put aside or removed meanwhile
                break
            left -= end - begin
            cursor = Cursor(part, end)
        return records, cursor

    def tail(self, size: int) -> list[dict[str, Any]]:
        """The records in the last bytes of the current file."""
        records: list[dict[str, Any]] = []
        try:
            begin = max(self._path.stat().st_size - size, 0)
            _read_lines(self._path, begin, math.inf, records.append)
        except OSError:
            return []
        return records

    def _parts(self) -> list[tuple[int, Path]]:
        """The files by number, in the order of writing; that of the current one follows on the last."""
        stem = self._path.name.removesuffix(".jsonl")
        found = (re.fullmatch(re.escape(stem) + r"\.(\d{1,9})\.jsonl", p.name) for p in self._path.parent.iterdir())
        aside = sorted(int(each[1]) for each in found if each)
        parts = [(number, self._path.with_name(f"{stem}.{number}.jsonl")) for number in aside]
        return [*parts, (aside[-1] + 1 if aside else 1, self._path)]


def _read_lines(path: Path, begin: int, limit: float, take: Callable[[dict[str, Any]], None]) -> int:
    """Give the records of whole lines to `take`; returns the byte after the last whole line."""
    with open(open_regular(path), "rb") as file:
        end = os.fstat(file.fileno()).st_size
        begin = begin if begin <= end else 0  # the file was replaced by a shorter one
        file.seek(begin)
        done, rest, skips = begin, b"", False
        while done - begin < limit and (block := file.read(_BLOCK)):
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                done += len(line) + 1
                if not skips and (record := _parsed(line)) is not None:
                    take(record)
                skips = False
            if len(rest) > LONGEST:  # nothing of it is kept
                done, rest, skips = done + len(rest), b"", True
    return done


def _parsed(line: bytes) -> dict[str, Any] | None:
    if len(line) > LONGEST:
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("kind"), str) else None


def number(value: object) -> float | None:
    """A finite number, else None."""
    kind = type(value)
    if kind is float:
        return value if math.isfinite(value) else None  # type: ignore[arg-type,return-value]
    return value if kind is int and abs(value) < _LARGEST else None  # type: ignore[arg-type,return-value]


def _table(value: object, names: tuple[str, ...] | None = None) -> dict[str, float]:
    """The numbers of an object, by name."""
    if not isinstance(value, Mapping):
        return {}
    rows = {str(name)[:_TEXT]: number(each) for name, each in list(value.items())[:_MOST_NAMES]}
    return {name: each for name, each in rows.items() if each is not None and (names is None or name in names)}


def _text(value: object) -> str:
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", "\ufffd", str(value))[:_TEXT]


class RunColumns:
    """Records as columns of numbers and a list of marks: what the page draws."""

    def __init__(self) -> None:
        self.columns: dict[str, list[float | None]] = {name: [] for name in COLUMNS}
        self.phases: dict[str, list[float | None]] = {name: [] for name in PHASES}
        self.memory: dict[str, list[float]] = {name: [] for name in ("step", *MEMORY)}
        self.links: dict[str, list[float | None]] = {"step": [], "within": [], "between": []}
        self.run: dict[str, Any] = {}
        self.kinds: dict[str, float] = {}
        self.operations: list[dict[str, Any]] = []
        self.experts: dict[str, list[Any]] = {}
        self.marks: list[dict[str, Any]] = []
        self._step: float = 0

    def add(self, records: list[dict[str, Any]]) -> RunColumns:
        """Take records in the order of writing."""
        for record in records:
            kind = record["kind"]
            if kind == "step":
                self._add_step(record)
            elif kind == "run":
                self._add_run(record)
            elif kind == "memory":
                self.kinds = _table(record.get("kinds"))
            elif kind == "experts":
                layers = record.get("layers")
                for name, use in list(layers.items())[:_MOST_NAMES] if isinstance(layers, Mapping) else ():
                    self.experts[_text(name)] = [number(each) for each in use[:3]] if isinstance(use, list) else []
            else:
                self._mark(record, kind)
        return self

    def as_dict(self) -> dict[str, Any]:
        """What is sent to the page."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def _add_step(self, record: Mapping[str, Any]) -> None:
        step = number(record.get("step"))
        if step is None:
            return
        self._step = step
        for name, column in self.columns.items():
            column.append(number(record.get(name)))
        times = record.get("ms")
        times = times if isinstance(times, dict) else {}
        for name, column in self.phases.items():
            column.append(number(times.get(name)))
        if isinstance(record.get("loss"), str):  # a name of what is not finite
            self.marks.append({"step": step, "kind": "loss", "text": f"loss is {_text(record['loss'])}"})
        if memory := _table(record.get("memory"), MEMORY):
            self.memory["step"].append(step)
            for name in MEMORY:
                self.memory[name].append(memory.get(name, 0))
        rows = record.get("comm")
        if isinstance(rows, list):
            self.operations = [_operation(row) for row in rows[:_MOST_NAMES] if isinstance(row, Mapping)]
            self.links["step"].append(step)
            for name in ("within", "between"):
                self.links[name].append(sum(row[name] for row in self.operations))

    def _add_run(self, record: Mapping[str, Any]) -> None:
        known = {name: value for name, value in record.items() if isinstance(value, (str, int, float))}
        self.run = {
            _text(k): _text(v) if isinstance(v, str) else number(v) for k, v in list(known.items())[:_MOST_NAMES]
        }
        if not record.get("goes_on"):
            restart = number(record.get("restart")) or 0
            what = f"restart {restart:.0f}" if restart else "a process begins"
            self._mark({"t": record.get("t"), "text": f"{what}, {_text(record.get('world'))} ranks"}, "start")

    def _mark(self, record: Mapping[str, Any], kind: str) -> None:
        step = number(record.get("step"))
        words = [
            f"{name} {value}" for name, value in record.items() if name not in ("kind", "t", "step", "text", "level")
        ]
        text = " ".join([str(record.get("text") or ""), *words]).strip()
        mark = {"step": self._step if step is None else step, "t": number(record.get("t"))}
        self.marks.append({**mark, "kind": _text(kind)[:20], "text": _text(text)})


def _operation(row: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {name: number(row.get(name)) or 0 for name in ("ranks", "count", "bytes", "within", "between")}
    return {"op": _text(row.get("op")), "group": _text(row.get("group")), **numbers, "ms": number(row.get("ms"))}


class RunFiles:
    """A run: a file per rank."""

    def __init__(self, name: str, files: Mapping[int, Path]) -> None:
        self.name = name
        self._files = dict(files)

    @property
    def ranks(self) -> list[int]:
        """The ranks that have a file."""
        return sorted(self._files)

    def read(self, rank: int | None = None, cursor: Cursor = Cursor(), limit: int | None = None) -> dict[str, Any]:
        """RunColumns of a rank, by default the first, after a cursor."""
        path = self._files[self.ranks[0] if rank is None else rank]
        records, after = RankReader(path).read(cursor, limit)
        return {**RunColumns().add(records).as_dict(), "cursor": str(after), "count": len(records)}

    def lanes(self, steps: int = 64, size: int = 1 << 14) -> dict[str, Any]:
        """Busy milliseconds (forward and backward without waiting) of every rank in the last steps."""
        rows: dict[int, dict[float, float]] = {}
        marks: list[dict[str, Any]] = []
        for rank in self.ranks:
            found = RunColumns().add(RankReader(self._files[rank]).tail(size))
            marks += [{**each, "rank": rank} for each in found.marks if rank != self.ranks[0]][-8:]
            times = zip(found.columns["step"], found.phases["forward"], found.phases["backward_inner"], strict=True)
            rows[rank] = {at: (one or 0) + (other or 0) for at, one, other in times if at is not None}
        shown = sorted({at for row in rows.values() for at in row})[-steps:]
        lanes = [[row.get(at) for at in shown] for row in rows.values()]
        return {"steps": shown, "ranks": list(rows), "lanes": lanes, "marks": marks[-1000:]}


def runs_of(folders: list[Path]) -> Iterator[RunFiles]:
    """The runs of some folders, named by both."""
    for folder in folders:
        for name, files in find_runs(folder).items():
            yield RunFiles(f"{folder.name}/{name}", files)
