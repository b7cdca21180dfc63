"""`WallClock`: the times of a step, per phase and per micro step."""

from __future__ import annotations

import pytest

from deepspeed.events import EventStream, Phase, PhaseBegan, PhaseFinished, StepFinished
from deepspeed.profiling.timers import WallClock

BACKWARD = (("backward_inner", 20.0), ("backward_allreduce", 5.0))


@pytest.fixture
def events():
    return EventStream()


def lines(capsys):
    return [line[line.index("time") :] for line in capsys.readouterr().out.splitlines()]


def test_a_step_of_two_micro_steps(events, clock, run_phase, finished, capsys):
    heard = []
    wall = WallClock().attach(events)
    wall.listen(lambda event, times: heard.append((event.step, {phase.value: ms for phase, ms in times.items()})))
    clock.finished = 0.0
    for number, forward in ((6, 10.0), (7, 11.0)):
        run_phase(events, "forward", forward, number, number == 7)
        run_phase(events, "backward", 1.0, number, number == 7, inside=BACKWARD)
    run_phase(events, "step", 3.0, 7)
    assert clock.waits == 0, "nothing waits inside the step"
    events.emit(finished(4))
    assert lines(capsys) == [
        "time (ms) | fwd_microstep: 10.00 | bwd_microstep: 26.00 | bwd_inner_microstep: 20.00"
        " | bwd_allreduce_microstep: 5.00",
        "time (ms) | fwd_microstep: 11.00 | bwd_microstep: 26.00 | bwd_inner_microstep: 20.00"
        " | bwd_allreduce_microstep: 5.00 | step_microstep: 3.00",
        "time (ms) | fwd: 21.00 | bwd: 52.00 | bwd_inner: 40.00 | bwd_allreduce: 10.00 | step: 3.00",
    ]
    times = {"forward": 21.0, "backward": 52.0, "backward_inner": 40.0, "backward_allreduce": 10.0, "step": 3.0}
    assert heard == [(4, times)]
    assert wall.timers("fwd").elapsed(reset=False) == 21.0
    assert wall.timers("fwd_microstep").elapsed(reset=False) == 11.0


def test_the_step_event_may_come_inside_the_step_phase(events, clock, finished, run_phase):
    heard = []
    wall = WallClock(log=False).attach(events)
    wall.listen(lambda event, times: heard.append((event.step, times[Phase.STEP])))
    for step in (1, 2):
        run_phase(events, "forward", 1.0)
        events.emit(PhaseBegan(Phase.STEP, 0, True))
        clock.now += 2.0
        events.emit(finished(step))
        clock.now += 3.0
        events.emit(PhaseFinished(Phase.STEP, 0, True))
    assert heard == [(1, 5.0), (2, 5.0)]


def test_the_next_step_starts_from_zero(events, run_phase, finished):
    wall = WallClock(log=False).attach(events)
    for length in (5.0, 7.0):
        run_phase(events, "forward", length)
        events.emit(finished())
        assert wall.timers("fwd").elapsed(reset=False) == length
    assert wall.timers("bwd").elapsed(reset=False) == 0.0


def test_nothing_is_written_without_log(events, run_phase, finished, capsys):
    WallClock(log=False).attach(events)
    run_phase(events, "forward", 1.0)
    events.emit(finished())
    assert capsys.readouterr().out == ""


def test_attached_in_the_middle_of_a_phase(events, clock, finished):
    heard = []
    wall = WallClock(log=False).attach(events)
    wall.listen(lambda event, times: heard.append(times[Phase.FORWARD]))
    events.emit(PhaseFinished(Phase.FORWARD, 0, True))
    events.emit(finished())
    assert heard == [0.0]


def test_many_forwards_without_a_step_do_not_pile_up(events, run_phase):
    wall = WallClock(log=False).attach(events)
    for _ in range(1000):
        run_phase(events, "forward", 1.0)
    assert len(wall.timers("fwd")._unread) < 100


def test_close_ends_everything(events, clock, finished):
    wall = WallClock(log=False).attach(events)
    heard = []
    listening = wall.listen(lambda *told: heard.append(told))
    listening.close()
    listening.close()
    events.emit(finished())
    assert heard == []
    wall.close()
    assert not any(events.wants(kind) for kind in (PhaseBegan, PhaseFinished, StepFinished))
