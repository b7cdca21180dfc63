"""While Triton is loaded threads take short turns, and afterwards those that they had."""

from __future__ import annotations

import sys

import pytest

from deepspeed.ops import triton_loading


@pytest.fixture(autouse=True)
def usual():
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield
    sys.setswitchinterval(before)


def test_turns_are_short_while_it_is_loaded_and_also_if_that_fails(monkeypatch):
    seen = []

    def load():
        seen.append(sys.getswitchinterval())
        raise ImportError("no triton")

    monkeypatch.setattr(triton_loading, "_load_all", load)
    with pytest.raises(ImportError, match="no triton"):
        triton_loading._load()
    assert seen == [pytest.approx(triton_loading._TURN_S)]
    assert sys.getswitchinterval() == pytest.approx(0.005)


@pytest.mark.parametrize("asked", [0.02, 1e-5])
def test_what_somebody_asks_for_meanwhile_stays(asked):
    with triton_loading._short_turns():
        sys.setswitchinterval(asked)
    assert sys.getswitchinterval() == pytest.approx(asked)


def test_turns_that_are_shorter_stay():
    sys.setswitchinterval(1e-5)
    with triton_loading._short_turns():
        assert sys.getswitchinterval() == pytest.approx(1e-5)
    assert sys.getswitchinterval() == pytest.approx(1e-5)
