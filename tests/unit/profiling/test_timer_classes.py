"""The timers that scripts use, `deepspeed.utils.timer` to them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from deepspeed.accelerator.clock import CudaEventTimer
from deepspeed.profiling import throughput
from deepspeed.profiling.throughput import ThroughputTimer
from deepspeed.profiling.timers import NamedTimer, NoopTimer, SynchronizedWallClockTimer, TimerError


def test_a_timer_adds_up_and_never_waits_before_it_is_read(clock):
    clock.finished = 0.0
    named = NamedTimer("fwd")
    for length in (3.0, 4.0):
        named.start()
        clock.now += length
        named.stop()
        clock.now += 100.0
    assert clock.waits == 0
    assert named.elapsed(reset=False) == 7.0
    assert clock.waits > 0
    assert named.elapsed() == 7.0
    assert named.elapsed() == 0.0


def test_a_running_timer_is_read_and_runs_on(clock):
    named = NamedTimer("fwd")
    named.start()
    clock.now += 3.0
    assert named.elapsed() == 3.0
    clock.now += 2.0
    named.stop()
    assert named.elapsed() == 2.0


def test_stop_may_forget_what_was_before(clock):
    named = NamedTimer("fwd")
    for length in (1.0, 2.0, 6.0):
        named.start()
        clock.now += length
        named.stop(reset=True)
    assert named.elapsed() == 6.0


def test_intervals_that_nobody_reads_do_not_pile_up(clock):
    named = NamedTimer("fwd")
    for _ in range(1000):
        named.start()
        clock.now += 1.0
        named.stop()
    assert len(named._unread) < 100
    assert clock.waits == 0
    assert named.elapsed() == 1000.0


def test_wrong_order_is_an_error_that_says_so():
    named = NamedTimer("fwd")
    with pytest.raises(TimerError, match="'fwd' is not running"):
        named.stop()
    named.start()
    with pytest.raises(AssertionError, match="already running"):
        named.start()
    named.reset()
    named.start()


def test_the_host_clock_where_the_device_is_the_host():
    named = NamedTimer("fwd")
    named.start()
    sum(range(1000))
    named.stop()
    assert named.elapsed() > 0.0


def test_the_log_line(clock, capsys):
    timers = SynchronizedWallClockTimer()
    for name, length in (("fwd_microstep", 12.0), ("bwd_microstep", 30.5)):
        timers(name).start()
        clock.now += length
        timers(name).stop()
    timers.log(["fwd_microstep", "bwd_microstep", "unknown"], normalizer=2.0, reset=False)
    assert capsys.readouterr().out.endswith("time (ms) | fwd_microstep: 6.00 | bwd_microstep: 15.25\n")
    assert timers("fwd_microstep").elapsed() == 12.0
    assert list(timers.get_timers()) == ["fwd_microstep", "bwd_microstep"]
    with pytest.raises(ValueError, match="above zero"):
        timers.log([], normalizer=0.0)


def test_the_log_line_with_memory(capsys):
    timers = SynchronizedWallClockTimer()
    timers("fwd").start()
    timers("fwd").stop()
    timers.log(["fwd"], memory_breakdown=True)
    line = capsys.readouterr().out
    assert "| mem_allocated: " in line
    assert "max_mem_reserved: " in line


def test_noop_has_the_same_interface(capsys):
    noop = NoopTimer()
    noop("fwd").start()
    noop("fwd").stop(reset=True)
    noop("fwd").reset()
    assert noop("fwd").elapsed(reset=False) == 0.0
    noop.log(["fwd"])
    assert noop.get_timers() == {}
    assert capsys.readouterr().out == ""


def test_event_timer_waits_for_its_end(clock):
    clock.finished = 0.0
    start, end = clock.Event(), clock.Event()
    start.record()
    clock.now = 5.0
    end.record()
    assert CudaEventTimer(start, end).get_elapsed_msec() == 5.0
    assert clock.waits == 1


@pytest.fixture
def seconds(monkeypatch):
    """The host's clock, moved by the test."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def throughput_lines(seconds, steps, micro_steps=1, enabled=True, **settings):
    lines = []
    config = SimpleNamespace(enabled=enabled, synchronized=True)
    measured = ThroughputTimer(config, 8, steps_per_output=2, logging_fn=lines.append, **settings)
    for _ in range(steps):
        for micro_step in range(micro_steps):
            measured.start()
            seconds.now += 0.5
            measured.stop(global_step=micro_step == micro_steps - 1)
            seconds.now += 100.0
    return measured, lines


def test_throughput_line_and_warm_up(seconds):
    measured, lines = throughput_lines(seconds, steps=4)
    assert len(lines) == 1
    start = "epoch=0/micro_step=4/global_step=4, RunningAvgSamplesPerSec=16.0, CurrSamplesPerSec=16.0, MemAllocated="
    assert lines[0].startswith(start)
    assert "GB, MaxMemAllocated=" in lines[0]
    assert measured.avg_samples_per_sec() == 16.0


def test_throughput_over_micro_steps_and_epochs(seconds):
    measured, lines = throughput_lines(seconds, steps=4, micro_steps=2, monitor_memory=True)
    assert "micro_step=8/global_step=4, RunningAvgSamplesPerSec=8.0, CurrSamplesPerSec=8.0" in lines[0]
    assert "vm %: " in lines[1]
    measured.update_epoch_count()
    assert (measured.epoch_count, measured.micro_step_count) == (1, 0)


def test_throughput_before_warm_up_and_disabled(seconds):
    measured, lines = throughput_lines(seconds, steps=2)
    assert measured.avg_samples_per_sec() == float("-inf")
    assert lines == []
    measured, lines = throughput_lines(seconds, steps=9, enabled=False)
    assert measured.global_step_count == 0
    assert lines == []


@pytest.mark.parametrize("synchronized", [True, False])
def test_throughput_synchronises_as_configured(monkeypatch, synchronized):
    waits = []
    monkeypatch.setattr(throughput, "get_accelerator", lambda: SimpleNamespace(synchronize=lambda: waits.append(1)))
    measured = ThroughputTimer(SimpleNamespace(enabled=True, synchronized=synchronized), 8, start_step=0)
    measured.start()
    measured.stop(global_step=True)
    assert len(waits) == (2 if synchronized else 0)
