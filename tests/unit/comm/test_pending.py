"""`Pending`: waits once, finishes once, looks like torch's Work where it stands for one."""

from datetime import timedelta

import pytest
import torch

from deepspeed.comm.pending import CollectiveWork, EventWait, Pending


class Waits:
    def __init__(self):
        self.waited = []

    def wait(self, *timeout):
        self.waited.append(timeout)

    def is_completed(self):
        return bool(self.waited)


def test_a_finished_result():
    pending = Pending(5)
    assert pending.is_completed()
    assert pending.wait() == 5


def test_waits_and_finishes_once():
    work, finished = Waits(), []
    pending = Pending([1], work, lambda result: finished.append(1) or [*result, 2])
    assert not pending.is_completed()
    assert pending.wait() == [1, 2]
    assert pending.wait() == [1, 2]
    assert (work.waited, finished) == ([()], [1])
    assert pending.is_completed()


def test_a_timeout_is_passed_on():
    work = Waits()
    Pending(None, work).wait(timedelta(seconds=1))
    assert work.waited == [(timedelta(seconds=1),)]


def test_a_failed_wait_can_be_tried_again():
    class Fails(Waits):
        def wait(self, *timeout):
            super().wait()
            if len(self.waited) == 1:
                raise RuntimeError("not yet")

    pending = Pending(1, Fails())
    with pytest.raises(RuntimeError):
        pending.wait()
    assert pending.wait() == 1


def test_events():
    class Event:
        ready = False

        def wait(self):
            self.ready = True

        def query(self):
            return self.ready

    pending = Pending("x", EventWait(Event()))
    assert not pending.is_completed()
    assert pending.wait() == "x"


def test_pendings_chain():
    assert Pending(2, Pending(1, Waits())).wait() == 2


def test_an_asynchronous_handle_is_like_torchs(single):
    tensor = torch.ones(2)
    handle = single.all_reduce(tensor, async_op=True)
    assert isinstance(handle, CollectiveWork)
    assert handle.wait() is True
    assert handle.wait() is True
    assert handle.is_completed()
    assert handle.get_future().value()[0].tolist() == [1, 1]
    assert "all_reduce" in repr(handle)
    with pytest.raises(AttributeError):
        _ = handle.no_such_method
    assert single.all_reduce(tensor, async_op=True).wait(timedelta(seconds=5)) is True
