"""The logger: quiet by default, told once, told by the chosen ranks only."""

from __future__ import annotations

import json
import logging

import pytest

from deepspeed import log as ds_logging


@pytest.fixture(autouse=True)
def _restore_level():
    level = ds_logging.logger.level
    yield
    ds_logging.logger.setLevel(level)


@pytest.fixture
def rank(monkeypatch):
    return lambda number: monkeypatch.setattr(ds_logging, "_rank", lambda: number)


def test_quiet_by_default(capsys):
    ds_logging.logger.info("not shown")
    ds_logging.logger.warning("shown")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "not shown" not in captured.err
    assert "[WARNING] [deepspeed] shown" in captured.err


@pytest.mark.parametrize(
    ("here", "ranks", "heard"),
    [(0, None, True), (1, None, False), (1, [1], True), (1, [0], False), (3, [-1], True), (-1, [2], True)],
)
def test_log_dist_speaks_on_the_chosen_ranks(capsys, rank, here, ranks, heard):
    rank(here)
    ds_logging.log_dist("hello", ranks=ranks, level=logging.ERROR)
    assert ("hello" in capsys.readouterr().err) is heard


def test_once_is_once(capsys):
    for _ in range(3):
        ds_logging.log_dist_once("only once", level=logging.ERROR)
        ds_logging.warn_once("warned once")
    err = capsys.readouterr().err
    assert err.count("only once") == 1
    assert err.count("warned once") == 1


def test_levels_by_name():
    ds_logging.set_log_level_from_string("INFO")
    assert ds_logging.get_current_level() == logging.INFO
    with pytest.raises(ValueError, match="'loud' is unknown; use one of debug, info"):
        ds_logging.set_log_level_from_string("loud")


def test_a_custom_logger_is_made_once():
    first = ds_logging.LoggerFactory.create_logger("deepspeed.test", logging.ERROR)
    again = ds_logging.LoggerFactory.create_logger("deepspeed.test", logging.ERROR)
    assert first is again
    assert len(first.handlers) == 1
    with pytest.raises(ValueError, match="needs a name"):
        ds_logging.LoggerFactory.create_logger()


def test_json_and_plain_print(capsys, tmp_path, rank):
    rank(0)
    ds_logging.print_json_dist({"loss": 1}, path=tmp_path / "line.json")
    assert json.loads((tmp_path / "line.json").read_text()) == {"loss": 1, "rank": 0}
    ds_logging.print_json_dist({"loss": 2})
    ds_logging.print_dist("plain")
    rank(1)
    ds_logging.print_dist("silent")
    assert capsys.readouterr().out == '{"loss": 2, "rank": 0}\n[Rank 0] plain\n'


def test_lines_about_a_run_are_shown_unless_a_level_is_asked_for(capsys):
    ds_logging.log_dist("began", level=ds_logging.NOTICE)
    ds_logging.set_log_level_from_string("warning")
    ds_logging.log_dist("ended", level=ds_logging.NOTICE)
    err = capsys.readouterr().err
    assert "began" in err
    assert "ended" not in err
