"""Whatever scripts put into client_state comes back, and no class is needed to read it."""

import argparse
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import http
import io
import pathlib
import pickle
import signal
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.checkpoint.formats.detect import open_checkpoint
from deepspeed.checkpoint.formats.safe_load import safe_load
from deepspeed.checkpoint.formats.values import MARK, decode, encode
from deepspeed.errors import CheckpointError, DeepSpeedError, UsageError
from tests.checkpoint_states import SMALL, WRITERS


class Phase(enum.Enum):
    WARM = "warm"


class Level(enum.IntEnum):
    HIGH = 3


Point = namedtuple("Point", "x y")
ZONE = dt.timezone(dt.timedelta(hours=-3, minutes=30))
VALUES = {
    "args": argparse.Namespace(lr=0.1, out=pathlib.Path("/x"), inner=argparse.Namespace(names=["a", ("b",)])),
    "simple": types.SimpleNamespace(a=1),
    "datetime": dt.datetime(2026, 11, 16, 3, 4, 5, 6, tzinfo=ZONE),
    "naive": dt.datetime(1, 1, 1, fold=1),
    "date": dt.date(2026, 2, 28),
    "time": dt.time(23, 59, 59, 999, tzinfo=dt.timezone.utc),
    "timedelta": dt.timedelta(days=-5, microseconds=7),
    "timezone": ZONE,
    "path": pathlib.Path("a/b c"),
    "pure": pathlib.PurePosixPath("/"),
    "windows": pathlib.PureWindowsPath("C:\\x"),
    "status": http.HTTPStatus.NOT_FOUND,
    "signal": signal.SIGTERM,
    "numpy": [np.float32(1.5), np.int64(-3), np.bool_(True), np.complex128(1 + 2j), np.float16(0.1)],
    "longdouble": np.longdouble("0.1"),
    "text": np.str_("ä"),
    "datetime64": np.datetime64("2026-01-01", "s"),
    "array": np.arange(6, dtype=">i4").reshape(2, 3),
    "bools": np.array([[True, False]]),
    "strings": np.array(["a", "bcd"]),
    "none": np.empty((0, 3)),
    "zero dims": np.array(3.5),
    "decimal": decimal.Decimal("1.10"),
    "fraction": fractions.Fraction(1, 3),
    "uuid": uuid.UUID(int=5),
    "ordered": OrderedDict(b=1, a=2),
    "default": defaultdict(list, {"a": [1]}),
    "counter": Counter("aab"),
    "set": {1, "a", (1, 2)},
    "paths": {pathlib.Path("a"), pathlib.Path("b")},
    "frozen": frozenset([1, frozenset()]),
    "range": range(2, 10, 3),
    "slice": slice(None, 5, np.int64(2)),
    "complex": 1 - 2j,
    "deque": deque([1, 2, 3], maxlen=3),
    "bytes": [b"", b"\0\xff", bytearray(b"x")],
    "keys": {dt.date(2026, 1, 1): 1, (1, "a"): 2, None: 3, 1.5: 4, http.HTTPStatus.OK: 5},
    "odd keys": {frozenset([1]): 1, (frozenset(),): 2},
    "mark": {MARK: 5},
    "marked": {MARK: ["UUID", "x"]},
    "nan": [float("inf"), -0.0],
    "torch": [torch.float16, torch.device("cpu"), torch.Size([2])],
    "large": 2**200,
}


def through(value):
    """As a file that needs nothing but torch."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(one, other):
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes()
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            same(left, right)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            same(one[key], other[key])
    else:
        assert one == other
        assert getattr(one, "tzinfo", None) == getattr(other, "tzinfo", None)
        assert getattr(one, "maxlen", None) == getattr(other, "maxlen", None)
        assert getattr(one, "default_factory", None) == getattr(other, "default_factory", None)


@pytest.mark.parametrize("name", VALUES)
def test_it_comes_back(name):
    same(decode(through(encode(VALUES[name], "x"))), VALUES[name])


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
plain |= st.dates() | st.datetimes(timezones=st.just(dt.timezone.utc)) | st.timedeltas() | st.uuids() | st.fractions()
keys = st.text(max_size=3) | st.integers() | st.dates() | st.just(MARK)
anything = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3)
        | st.tuples(inner, inner)
        | st.frozensets(plain, max_size=3)
        | st.builds(argparse.Namespace, a=inner)
    ),
    max_leaves=8,
)


@given(anything)
def test_anything_comes_back(value):
    assert decode(through(encode(value, "x"))) == value


@pytest.mark.parametrize("form", WRITERS)
def test_in_a_checkpoint(tmp_path, form):
    for rank in range(2):
        state = dataclasses.replace(SMALL.state(2, rank, 2), client_state=VALUES)
        WRITERS[form](state).write(tmp_path)
    found = open_checkpoint(tmp_path).small.client_state
    same(dict(found), VALUES)
    if form == "deepspeed":  # what other programs look for is there too, simpler
        file = torch.load(tmp_path / "mp_rank_00_model_states.pt", weights_only=True)
        assert file["args"] == {"lr": 0.1, "out": "/x", "inner": {"names": ["a", ("b",)]}}
        assert (file["date"], file["path"], file["status"], file["decimal"]) == ("2026-02-28", "a/b c", 404, "1.10")


def test_what_a_script_defines():
    """Enums by their value, named tuples as tuples, other factories as none: classes may be gone when it is read."""
    found = decode(through(encode([Phase.WARM, Level.HIGH, Point(1, 2), defaultdict(lambda: 5, a=1)], "x")))
    assert found == ["warm", 3, (1, 2), {"a": 1}]
    assert [type(item) for item in found] == [str, int, tuple, defaultdict]


def test_what_cannot_be_kept():
    itself = []
    itself.append(itself)
    for value, text in (
        (object(), r"x is a builtins.object"),
        ({"a": [lambda: 1]}, r"x\['a'\]\[0\] is a builtins.function"),
        (argparse.Namespace(f=open), r"x.f is a "),
        (np.array([object()]), "x is a numpy.ndarray"),
        (itself, "x holds itself"),
        (torch.eye(2).to_sparse(), "x is a tensor of torch.sparse_coo"),
        (Phase, "x is a enum.EnumType|x is a enum.EnumMeta"),
    ):
        with pytest.raises(UsageError, match=text):
            encode(value, "x")


HOSTILE = [
    5, [], [5], ["no such"], ["enum", "os.system", "x"], ["enum", "http.HTTPStatus", "__class__"], ["path", "os", "x"],
    ["number", "O", 5], ["number", "V100", 5], ["array", "<f8", [2**40], torch.zeros(8, dtype=torch.uint8)],
    ["array", "<f8", [-1, -1], torch.zeros(8, dtype=torch.uint8)],
    ["array", "O", [1], torch.zeros(8, dtype=torch.uint8)],
    ["timedelta", 10**30, 0, 0], ["datetime", "yesterday", 0], ["Namespace", 5], ["Namespace", {"a": {MARK: ["x"]}}],
    ["defaultdict", "eval", []], ["Decimal", "x" * 100], ["range", 1, 2, 0], ["set", [[1]]], ["deque", [], -1],
    ["UUID", "x\x1b[2J"], ["Fraction", "1/0"], ["bytes", "x"], ["scalar", "<f8", [], 5], ["timezone", 999, 0, 0],
]  # fmt: skip


@pytest.mark.parametrize("tagged", HOSTILE, ids=lambda tagged: repr(tagged)[:40])
def test_hostile_tags(tagged):
    with pytest.raises(DeepSpeedError) as told:
        decode({MARK: tagged})
    assert isinstance(told.value, CheckpointError)
    assert "\x1b" not in str(told.value)


def test_no_memory_is_taken_for_what_is_not_there():
    assert decode({MARK: ["range", 0, 10**30, 1]}) == range(10**30)
    with pytest.raises(CheckpointError):
        decode({MARK: ["bytes", 10**12]})


def test_what_deepspeed_pickled_is_read(tmp_path):
    values = {
        "args": VALUES["args"],
        "when": dt.datetime(2026, 1, 1),
        "path": pathlib.PosixPath("/x"),
        "id": uuid.UUID(int=5),
    }
    torch.save(values, tmp_path / "x.pt")
    found = safe_load(tmp_path / "x.pt")
    assert found == values
    (tmp_path / "x.pt").unlink()
    torch.save({"s": slice(1), "e": signal.SIGTERM}, tmp_path / "x.pt", pickle_module=pickle)
    with pytest.raises(CheckpointError, match=r"holds an object of|cannot be read"):
        safe_load(tmp_path / "x.pt")
