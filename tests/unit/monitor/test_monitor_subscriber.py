"""`MonitorSubscriber`: a finished step becomes the documented metrics."""

from __future__ import annotations

import pytest
import torch

from deepspeed.accelerator import clock as module
from deepspeed.events import EventStream, Phase, PhaseBegan, PhaseFinished, StepFinished
from deepspeed.monitor.monitor import Monitor, MonitorSubscriber
from deepspeed.profiling.timers import WallClock


class Kept(Monitor):
    def __init__(self):
        super().__init__({})
        self.calls, self.closed = [], False

    def write_events(self, event_list):
        self.calls.append([(label, float(value), step) for label, value, step in event_list])

    def close(self):
        self.closed = True

    @property
    def all(self):
        return [event for call in self.calls for event in call]


def finished(step=1, **changes):
    facts = {
        "step": step,
        "samples": 8 * step,
        "applied": True,
        "skipped_steps": 0,
        "lr": (0.5, 0.25),
        "momentum": (),
        "loss_scale": None,
    }
    norm, loss = changes.pop("grad_norm", None), changes.pop("loss", None)
    found = {"find_grad_norm": lambda: norm, "find_loss": lambda: loss}
    return StepFinished(**{**facts, **found, **changes})


def test_the_learning_rate_of_the_first_group_over_samples():
    monitor, events = Kept(), EventStream()
    MonitorSubscriber(monitor).attach(events)
    events.emit(finished(1))
    events.emit(finished(2))
    assert monitor.calls == [[("Train/Samples/lr", 0.5, 8)], [("Train/Samples/lr", 0.5, 16)]]


@pytest.mark.parametrize("loss", [1.5, torch.tensor(1.5), torch.tensor([1.0, 2.0], dtype=torch.bfloat16)])
def test_scale_and_loss_where_they_are_known(loss):
    monitor, events = Kept(), EventStream()
    MonitorSubscriber(monitor).attach(events)
    events.emit(finished(loss_scale=65536.0, loss=loss))
    assert monitor.calls == [
        [("Train/Samples/lr", 0.5, 8), ("Train/Samples/loss_scale", 65536.0, 8), ("Train/Samples/train_loss", 1.5, 8)]
    ]


def test_the_times_of_the_wall_clock():
    monitor, events = Kept(), EventStream()
    clock = WallClock(log=False).attach(events)
    MonitorSubscriber(monitor, times=clock).attach(events)
    for phase in (Phase.FORWARD, Phase.STEP):
        events.emit(PhaseBegan(phase, 0, True))
        events.emit(PhaseFinished(phase, 0, True))
    events.emit(finished())
    names = {label.removeprefix("Train/Samples/") for label, _, step in monitor.all if step == 8}
    times = ("forward", "backward", "backward_inner", "backward_allreduce", "step")
    assert names == {"lr", *(f"elapsed_time_ms_{name}" for name in times)}


def test_close_ends_both_subscriptions_and_leaves_the_monitor_to_its_owner():
    monitor, events = Kept(), EventStream()
    clock = WallClock(log=False).attach(events)
    subscriber = MonitorSubscriber(monitor, times=clock).attach(events)
    subscriber.close()
    subscriber.close()
    events.emit(finished())
    assert monitor.calls == []
    assert not monitor.closed
    clock.close()
    assert not events.wants(StepFinished)


class FakeEvent:
    """Device work that ends when the test says so, or when somebody waits."""

    done = False

    def record(self):
        pass

    def query(self):
        return self.done

    def synchronize(self):
        type(self).done = True


class FakeDevice:
    Event = FakeEvent

    def on_accelerator(self, tensor):
        return True

    def is_synchronized_device(self):
        return False


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(module, "get_accelerator", FakeDevice)
    monkeypatch.setattr(FakeEvent, "done", False)
    return FakeEvent


def test_a_loss_still_being_computed_is_not_waited_for(device):
    monitor, events = Kept(), EventStream()
    subscriber = MonitorSubscriber(monitor).attach(events)
    events.emit(finished(1, loss=torch.tensor(1.0)))
    assert monitor.calls == []
    assert not device.done, "the step did not wait"
    events.emit(finished(2, loss=torch.tensor(2.0)))
    assert [step for *_, step in monitor.all][:2] == [8, 8]
    subscriber.close()
    assert [(label, value, step) for label, value, step in monitor.all if "loss" in label] == [
        ("Train/Samples/train_loss", 1.0, 8),
        ("Train/Samples/train_loss", 2.0, 16),
    ]


def test_a_loss_that_is_ready_is_written_at_once(device):
    device.done = True
    monitor, events = Kept(), EventStream()
    MonitorSubscriber(monitor).attach(events)
    events.emit(finished(1, loss=torch.tensor(1.0)))
    assert ("Train/Samples/train_loss", 1.0, 8) in monitor.all
