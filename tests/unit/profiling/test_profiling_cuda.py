"""Measuring on a real GPU: right times, and no wait before something is read."""

from __future__ import annotations

import pytest
import torch

from deepspeed.accelerator import clock
from deepspeed.accelerator.cuda import CUDA_Accelerator
from deepspeed.events import EventStream, Phase, PhaseBegan, PhaseFinished
from deepspeed.monitor import monitor
from deepspeed.monitor.monitor import Monitor
from deepspeed.profiling.throughput import Throughput
from deepspeed.profiling.timers import WallClock

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=str(CUDA_Accelerator.why_unavailable())),
]

LONG = 200_000_000  # cycles: about a tenth of a second


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    accelerator = CUDA_Accelerator()
    monkeypatch.setattr(clock, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(monitor, "get_accelerator", lambda: accelerator)
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()


def busy() -> bool:
    return not torch.cuda.current_stream().query()


def sleep_in(events, phase):
    events.emit(PhaseBegan(phase, 0, True))
    torch.cuda._sleep(LONG)
    events.emit(PhaseFinished(phase, 0, True))


def test_wall_clock_measures_device_time_and_waits_only_at_the_boundary(finished):
    events, heard = EventStream(), []
    wall = WallClock(log=False).attach(events)
    wall.listen(lambda event, times: heard.append(times))
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.STEP):
        sleep_in(events, phase)
    assert busy()
    events.emit(finished())
    assert not busy()
    times = heard[0]
    assert times[Phase.FORWARD] > 10.0
    assert times[Phase.BACKWARD] == pytest.approx(times[Phase.FORWARD], rel=0.5)
    assert times[Phase.BACKWARD_INNER] == 0.0


def test_throughput_waits_only_when_it_is_read(finished):
    events = EventStream()
    measured = Throughput(8, start_step=0).attach(events)
    sleep_in(events, Phase.FORWARD)
    events.emit(finished())
    assert busy()
    rate = measured.samples_per_second
    assert not busy()
    assert 1.0 < rate < 800.0


class Kept(Monitor):
    def __init__(self):
        super().__init__({})
        self.events = []

    def write_events(self, event_list):
        self.events += [(label, float(value), step) for label, value, step in event_list]


def test_the_monitor_never_waits_and_writes_the_loss_of_that_step(finished):
    events, monitor = EventStream(), Kept()
    listener = monitor.MonitorSubscriber(monitor).attach(events)
    loss = torch.ones((), device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    loss.mul_(3.0)
    events.emit(finished(loss=loss))
    loss.zero_()  # the engine may use the tensor again
    assert busy()
    assert monitor.events == []
    listener.close()
    assert ("Train/Samples/train_loss", 3.0, 8) in monitor.events
