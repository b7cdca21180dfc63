"""Tensors that leave for host memory and come back: right values whatever the copies do, within the limits."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.accelerator import get_accelerator, reset_accelerator, set_accelerator
from deepspeed.accelerator.cpu import CPU_Accelerator
from deepspeed.memory import streaming
from deepspeed.memory.streaming import CopyStream, DeviceCopyStream, copy_stream_for
from deepspeed.runtime.activation_checkpointing.offload import (
    ActivationOffload,
    CallGroup,
    CheckpointingError,
    HostPool,
    size_class,
)


@pytest.fixture(autouse=True)
def host():
    set_accelerator(CPU_Accelerator())
    yield
    reset_accelerator()


class LateLane:
    """A stream whose copies happen as late as they may: when somebody joins one, or when told."""

    def __init__(self, device=None):
        self.queue = deque()
        self.copies = 0

    def copy(self, into, source):
        ticket = LateTicket(self)
        self.queue.append((ticket, into, source.detach()))
        self.copies += 1
        return ticket

    def advance(self, count):
        for _ in range(min(count, len(self.queue))):
            ticket, into, source = self.queue.popleft()
            into.copy_(source)
            ticket.finished = True

    def synchronize(self):
        self.advance(len(self.queue))


class LateTicket:
    def __init__(self, lane):
        self.lane, self.finished = lane, False

    def done(self):
        return self.finished

    def join(self):
        while not self.finished:
            self.lane.advance(1)


def late(**limits):
    """(offload, its lane)."""
    made = LateLane()
    return ActivationOffload(**limits, copy_stream=lambda device: made), made


def forget(memory):
    """What happens to device memory that is free: something else is written into it."""
    memory.fill_(float("nan"))


def saved(offload, value, numel=8, turn=None):
    """A tensor of this value, parked; once nobody holds the tensor its memory is another's."""
    memory = torch.full((numel,), float(value))
    tensor = torch.from_numpy(memory.numpy())  # the same memory, other versions
    weakref.finalize(tensor, forget, memory)
    return offload.park(tensor, tensor.shape, turn or CallGroup())


@pytest.fixture
def filled():
    """Memory that was not written holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


limits = st.fixed_dictionaries({"stash": st.integers(0, 3), "keep_last": st.integers(0, 3)})


@pytest.mark.usefixtures("filled")
@given(limits, st.integers(0, 12), st.integers(1, 3), st.data())
def test_values_come_back_whenever_copies_happen(sizes, calls, per_call, data):
    offload, lane = late(**sizes)
    for step in range(2):  # the second one uses the host buffers of the first
        graph = []
        for call in range(calls):
            turn = CallGroup()
            graph.append([saved(offload, 100 * step + 10 * call + each, turn=turn) for each in range(per_call)])
            assert offload.on_device <= sizes["stash"] + sizes["keep_last"]
            lane.advance(data.draw(st.integers(0, 3)))
        while graph:
            members = graph.pop()
            for each, parked in enumerate(members):
                lane.advance(data.draw(st.integers(0, 3)))
                assert offload.give_back(parked).eq(100 * step + 10 * len(graph) + each).all()
            del members, parked


@given(limits, st.integers(1, 12))
def test_the_last_ones_stay_and_the_others_go(sizes, calls):
    offload, _ = late(**sizes)
    graph = [saved(offload, call) for call in range(calls)]
    stay = min(calls, sizes["keep_last"])
    assert offload.stats.offloaded_tensors == calls - stay == offload.pool.in_use
    for parked in reversed(graph):
        offload.give_back(parked)
    assert offload.stats.kept_last_tensors == stay
    assert offload.stats.restored_tensors == calls - stay
    assert offload.stats.restored_bytes == offload.stats.offloaded_bytes == 32 * (calls - stay)


def test_backward_finds_the_turn_before_on_its_way():
    offload, lane = late(stash=0, keep_last=0)
    turns = [CallGroup() for _ in range(3)]
    graph = [[saved(offload, 10 * at + each, turn=turn) for each in range(2)] for at, turn in enumerate(turns)]
    assert (lane.copies, len(lane.queue)) == (6, 0)
    offload.give_back(graph[2][0])
    assert lane.copies == 10  # the whole call, and the one before
    assert len(lane.queue) == 3  # none of which is waited for but the one that was asked for
    offload.give_back(graph[2][1])
    assert lane.copies == 10
    offload.give_back(graph[1][0])
    assert lane.copies == 12
    assert offload.give_back(graph[0][1]).eq(1).all()
    assert lane.copies == 12


def test_the_graph_may_be_used_again():
    offload, _ = late(stash=0, keep_last=1)
    graph = [saved(offload, call) for call in range(3)]
    for _ in range(2):
        for call in (2, 1, 0):
            assert offload.give_back(graph[call]).eq(call).all()


def test_a_graph_that_is_dropped_gives_everything_back():
    offload, lane = late(stash=1, keep_last=1, pool=2)
    graph = [saved(offload, call) for call in range(6)]
    assert offload.pool.in_use == 5
    offload.give_back(graph[3])
    del graph
    gc.collect()
    assert (offload.on_device, offload.pool.in_use, offload.pool.unused) == (0, 0, 2)
    # What is on its way to the device needs its memory until it has come.
    assert len(offload._coming) == 1
    again = saved(offload, 7)
    assert offload.give_back(again).eq(7).all()
    lane.synchronize()
    offload.give_back(again)
    assert offload._coming == []


@pytest.mark.parametrize("sizes", [{"keep_last": 1}, {"keep_last": 0, "stash": 1}, {"keep_last": 1, "stash": 0}])
def test_a_change_in_place_is_noticed_where_the_copy_may_have_seen_it(sizes):
    offload, _ = late(**sizes)
    tensor = torch.zeros(2, 3)
    parked = offload.park(tensor.view(-1), tensor.shape, CallGroup())
    tensor.add_(1)
    later = [saved(offload, 1) for _ in range(3)]
    with pytest.raises(CheckpointingError, match=r"shape \[2, 3\], is at version 1 but was given at version 0"):
        offload.give_back(parked)
    assert offload.give_back(later[0]).eq(1).all()


def test_a_change_after_the_copy_changes_nothing():
    offload, _ = late(stash=0, keep_last=0)
    tensor = torch.zeros(4)
    parked = offload.park(tensor.view(-1), tensor.shape, CallGroup())
    tensor.add_(1)
    assert offload.give_back(parked).eq(0).all()


def test_drain_waits_and_frees_but_loses_nothing():
    offload, lane = late(stash=2, keep_last=1)
    graph = [saved(offload, call) for call in range(5)]
    del graph[1]
    offload.drain()
    assert not lane.queue
    assert (offload.on_device, offload.pool.unused, offload.pool.in_use) == (1, 0, 3)
    assert [float(offload.give_back(parked)[0]) for parked in graph] == [0, 2, 3, 4]


def test_where_there_are_no_streams_copies_are_made_at_once():
    assert type(copy_stream_for(torch.device("cpu"))) is CopyStream
    offload = ActivationOffload(keep_last=0)
    parked = saved(offload, 3)
    assert offload.on_device == 0
    assert offload.give_back(parked).eq(3).all()


class Streams(CPU_Accelerator):
    """A device with streams, which tells in which order it was asked for what."""

    def __init__(self):
        super().__init__()
        self.told = []
        self.on = "computing"

    @property
    def Stream(self):
        return object

    def device(self, device_index=None):
        self.told.append(f"device {device_index}")
        return nullcontext()

    def current_stream(self, device_index=None):
        return self.on


class Beside:
    """As the one of the package, for a device that is the host."""

    def __init__(self, device):
        self.told = get_accelerator().told

    def __enter__(self):
        self.told.append("beside")

    def __exit__(self, *exc):
        self.told.append("back")

    def record(self):
        return Event(self.told)


class Event:
    def __init__(self, told):
        self.told = told
        self.told.append("record")

    def query(self):
        return False

    def wait(self, stream):
        self.told.append(f"wait on {stream}")

    def synchronize(self):
        self.told.append("synchronize")


def test_a_device_copies_on_its_second_stream(monkeypatch):
    accelerator = Streams()
    set_accelerator(accelerator)
    monkeypatch.setattr(streaming, "SideStream", Beside)
    made = copy_stream_for(torch.device("cpu", 0))
    assert isinstance(made, DeviceCopyStream)
    made.synchronize()  # nothing was copied yet
    into = torch.zeros(2)
    ticket = made.copy(into, torch.ones(2))
    assert into.eq(1).all()
    assert not ticket.done()
    ticket.join()
    made.synchronize()
    asked = ["device 0", "device 0", "beside", "back", "record", "device 0", "wait on computing", "synchronize"]
    assert accelerator.told == asked


# ---- host buffers


def made():
    sizes = []

    def make(nbytes):
        sizes.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    return make, sizes


@given(st.integers(1, 2**40))
def test_a_buffer_is_little_larger_than_what_it_is_for(nbytes):
    size = size_class(nbytes)
    assert nbytes <= size < nbytes + max(512, nbytes / 8 + 1)
    assert size_class(size) == size


@given(
    st.none() | st.integers(0, 4),
    st.lists(st.tuples(st.integers(1, 3000), st.booleans()), max_size=40),
)
def test_buffers_are_bounded_and_never_shared(limit, requests):
    make, _ = made()
    pool = HostPool(limit, make)
    held, most = [], 0
    for value, (numel, drop) in enumerate(requests):
        if drop and held:
            held.pop(0)
        slot = pool.take(numel, torch.float32)
        slot.tensor.fill_(value)
        held.append((value, slot))
        del slot
        most = max(most, len(held))
        assert pool.in_use == len(held)
        assert pool.unused <= (most if limit is None else limit)
        assert all(bool(slot.tensor.eq(wrote).all()) for wrote, slot in held)
    held.clear()
    assert pool.in_use == 0
    assert pool.unused <= (most if limit is None else limit)
    pool.clear()
    assert pool.unused == 0


def test_steps_that_are_alike_make_buffers_once():
    make, sizes = made()
    pool = HostPool(None, make)
    for _ in range(3):
        slots = [pool.take(numel, torch.bfloat16) for numel in (4096, 4096, 8192)]
        del slots
    assert sizes == [8192, 8192, 16384]


def test_sizes_that_nobody_asks_for_any_more_go():
    make, _ = made()
    pool = HostPool(None, make)
    for numel in (4096, 8192, 16384, 32768):
        slots = [pool.take(numel, torch.uint8) for _ in range(3)]
        del slots
        assert pool.unused == 3
    slots = [pool.take(32768, torch.uint8) for _ in range(3)]
    assert pool.unused == 0
    del slots


def test_a_pool_of_none_keeps_none():
    make, sizes = made()
    pool = HostPool(0, make)
    for _ in range(3):
        pool.take(10, torch.float32)
    assert (pool.unused, len(sizes)) == (0, 3)
