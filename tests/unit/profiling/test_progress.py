"""The step line and the progress bar."""

from __future__ import annotations

import io
import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.events import EventStream, StepFinished
from deepspeed.profiling.progress import ProgressBar, StepLine, short
from deepspeed.profiling.throughput import Throughput


@pytest.fixture
def events():
    return EventStream()


def test_the_line_of_a_plain_step(events, finished, capsys):
    StepLine(10).attach(events)
    for step in range(1, 21):
        events.emit(finished(step, loss=torch.tensor(2.0), grad_norm=torch.tensor(1.234), lr=(3e-4, 3e-4)))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[:4] for line in lines] == [
        [f"step {step}", "loss 2.0000", "lr 0.0003", "grad norm 1.23"] for step in (10, 20)
    ]
    assert lines[0].split(" | ")[4].startswith("memory ")
    assert len(lines[0].split(" | ")) == 5, "no scale, nothing skipped, no rates: not mentioned"


def test_the_line_of_a_scaled_step_that_was_skipped(events, finished):
    lines = []
    StepLine(1, write=lines.append).attach(events)
    events.emit(
        finished(loss=torch.tensor([1.0, 2.0]), loss_scale=65536.0, skipped_steps=3, applied=False, lr=(0.1, 0.2))
    )
    assert lines[0].split(" | ")[:5] == [
        "step 1",
        "loss 1.5000",
        "lr 0.1, 0.2",
        "loss scale 65536",
        "skipped 3, this one too",
    ]


def test_the_rate_where_it_is_known(events, finished, clock):
    lines = []
    measured = Throughput(8, start_step=0).attach(events)
    StepLine(1, throughput=measured, write=lines.append).attach(events)
    for step in (1, 2):
        clock.now += 500.0
        events.emit(finished(step))
    assert "samples/s" not in lines[0]
    assert "| 16 samples/s |" in lines[1]


@pytest.mark.parametrize("never", [None, math.inf])
def test_never_means_that_nothing_listens(events, never):
    StepLine(never).attach(events)
    assert not events.wants(StepFinished)


def test_close_and_other_ranks(events, monkeypatch):
    StepLine(1).attach(events).close()
    monkeypatch.setenv("RANK", "3")
    StepLine(1).attach(events)
    assert not events.wants(StepFinished)


def test_only_shown_steps_read_the_device(events, finished):
    class Loss(torch.Tensor):
        reads = 0

        def detach(self):
            Loss.reads += 1
            return torch.tensor(1.0)

    StepLine(5, write=lambda line: None).attach(events)
    for step in range(1, 11):
        events.emit(finished(step, loss=Loss()))
    assert Loss.reads == 2


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (0.00123, "0.00123"),
        (12.34, "12.3"),
        (999.9, "1k"),
        (1234, "1.23k"),
        (-45.6e6, "-45.6M"),
        (math.nan, "nan"),
    ],
)
def test_short(number, text):
    assert short(number) == text


@given(st.floats(1e-3, 9e14))
def test_short_keeps_three_digits(number):
    text = short(number)
    factor = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(text[-1])
    value = float(text) if factor is None else float(text[:-1]) * factor
    assert value == pytest.approx(number, rel=0.006)
    assert "e+" not in text


def test_plain_lines_where_there_is_no_terminal(capsys):
    with ProgressBar(100, description="training", lines=4) as bar:
        for step in range(100):
            bar.update(loss=torch.tensor(float(step)), tokens_per_s=1234.0)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[:3] for line in lines] == [
        [f"training step {done}/100", f"loss {done - 1}", "tokens/s 1.23k"] for done in (25, 50, 75, 100)
    ]


def test_a_bar_on_a_terminal(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    with ProgressBar(4, description="training", terminal=True) as bar:
        for _ in range(4):
            bar.update(loss=0.5)
        sys.stdout.write("step 4 | loss 0.5000\n")
    text = screen.getvalue()
    assert "4/4" in text
    assert "loss 0.5" in text
    assert "step 4 | loss 0.5000" in text
    assert sys.stdout is screen


def test_a_bar_that_follows_an_engine(events, finished, capsys):
    bar = ProgressBar(2, lines=2).attach(events)
    events.emit(finished(1, loss=torch.tensor(0.5)))
    events.emit(finished(2))
    bar.close()
    events.emit(finished(3))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[:-1] for line in lines] == [
        ["step 1/2", "loss 0.5", "lr 0.001"],
        ["step 2/2", "lr 0.001"],
    ]


def test_no_bar_on_other_ranks(events, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    with ProgressBar(1, terminal=True).attach(events) as bar:
        bar.update(loss=1.0)
    assert capsys.readouterr().out == ""
    assert not events.wants(StepFinished)
