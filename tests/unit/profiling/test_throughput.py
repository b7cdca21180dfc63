"""`Throughput`: rates on the device's clock, without waiting for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.events import EventStream, PhaseBegan, StepFinished
from deepspeed.profiling.throughput import Throughput, _rate


@pytest.fixture
def events():
    return EventStream()


def train(events, run_phase, finished, clock, lengths, pause=0.0):
    for number, length in enumerate(lengths, 1):
        clock.now += pause
        run_phase(events, "forward", length / 2)
        run_phase(events, "backward", length / 2)
        events.emit(finished(number))


def test_average_and_current_after_warm_up(events, run_phase, finished, clock):
    measured = Throughput(8).attach(events)
    train(events, run_phase, finished, clock, [900.0, 700.0])
    assert measured.samples_per_second is None
    assert measured.current_samples_per_second is None
    train(events, run_phase, finished, clock, [100.0, 300.0], pause=5000.0)
    assert measured.samples_per_second == pytest.approx(16 / 0.4)
    assert measured.current_samples_per_second == pytest.approx(8 / 0.3)


def test_nothing_waits_until_a_rate_is_read(events, run_phase, finished, clock):
    clock.finished = 0.0
    measured = Throughput(8).attach(events)
    train(events, run_phase, finished, clock, [100.0] * 200)
    assert clock.waits == 0
    assert measured.samples_per_second == pytest.approx(80.0)
    assert clock.waits > 0


def test_a_batch_size_that_changes(events, run_phase, finished, clock):
    sizes = iter([8, 24])
    measured = Throughput(lambda: next(sizes), start_step=0).attach(events)
    train(events, run_phase, finished, clock, [1000.0, 1000.0])
    assert measured.samples_per_second == pytest.approx(16.0)
    assert measured.current_samples_per_second == pytest.approx(24.0)


def test_a_loader_that_starts_the_step_makes_loading_count(events, run_phase, finished, clock):
    measured = Throughput(8, start_step=0).attach(events)
    measured.start()
    clock.now += 600.0
    measured.start()
    train(events, run_phase, finished, clock, [400.0])
    assert measured.samples_per_second == pytest.approx(8.0)
    measured.update_epoch_count()
    assert measured.epoch_count == 1


def test_without_phases_a_step_lasts_from_the_last_one(events, finished, clock):
    measured = Throughput(8, start_step=0).attach(events)
    for number in (1, 2):
        clock.now += 500.0
        events.emit(finished(number))
    assert measured.samples_per_second == pytest.approx(16.0)


def test_unsynchronized_is_the_host_clock(events, run_phase, finished, clock):
    measured = Throughput(8, start_step=0, synchronized=False).attach(events)
    train(events, run_phase, finished, clock, [1e9])
    rate = measured.samples_per_second
    assert rate is None or rate > 8 / 1e4, "the device's 1e6 seconds were not counted"


def test_close(events, clock):
    measured = Throughput(8).attach(events)
    measured.close()
    assert not events.wants(StepFinished)
    assert not events.wants(PhaseBegan)


@given(st.floats(0.1, 1e6), st.floats(0.001, 1e9))
def test_rate(amount, milliseconds):
    assert _rate(amount, milliseconds) == pytest.approx(amount / (milliseconds / 1000))
    assert _rate(amount, 0.0) is None
