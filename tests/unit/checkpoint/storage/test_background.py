"""Snapshots keep what tensors held; one job at a time, whose error the next call raises."""

import threading
from collections import OrderedDict

import pytest
import torch
from torch import nn

from deepspeed.checkpoint.storage.background import Background, Snapshot
from deepspeed.checkpoint.storage.durable import payload
from deepspeed.errors import CheckpointError


def test_a_snapshot_does_not_follow_its_tensors():
    flat = torch.arange(100.0)
    state = {
        "part": flat[10:20],
        "matrix": flat[20:80].view(6, 10).t(),
        "list": [torch.ones(3, dtype=torch.bfloat16), (torch.tensor(5), "text", None)],
        "empty": torch.empty(0, 3),
        "param": nn.Parameter(torch.ones(2)),
        "sparse": torch.eye(3).to_sparse(),
        "conj": torch.ones(2, dtype=torch.complex64).conj(),
    }
    expected = {name: state[name].clone() for name in ("part", "matrix", "empty", "param")}
    taken = Snapshot().take(state)
    flat.zero_()
    state["list"][0].zero_()
    state["param"].data.zero_()
    for name, value in expected.items():
        assert torch.equal(taken[name], value)
        assert taken[name].stride() == value.stride() or value.numel() == 0 or name == "matrix"
    assert taken["matrix"].stride() == (1, 10)
    assert taken["list"][0].tolist() == [1, 1, 1]
    assert taken["list"][1][1:] == ("text", None)
    assert taken["sparse"].to_dense().sum() == 3
    assert taken["part"].untyped_storage().data_ptr() == taken["matrix"].untyped_storage().data_ptr(), "still shared"
    assert payload(taken["part"]) == 70 * 4, "of a large memory only what is used"


def test_state_dicts_keep_their_metadata():
    state = nn.BatchNorm1d(3).state_dict()
    taken = Snapshot().take(state)
    assert isinstance(taken, OrderedDict)
    assert taken._metadata == state._metadata


def test_different_dtypes_in_one_memory():
    memory = torch.arange(64, dtype=torch.uint8)
    odd, floats = memory[1:4], memory[8:24].view(torch.float64)
    taken = Snapshot().take([odd, floats])
    assert torch.equal(taken[0], odd)
    assert torch.equal(taken[1].view(torch.uint8), memory[8:24])


def test_buffers_are_used_again():
    snapshot = Snapshot()
    source = torch.arange(1000.0)
    first = snapshot.take([source])[0].data_ptr()
    snapshot.begin()
    source.add_(1)
    second = snapshot.take([source])[0]
    assert second.data_ptr() == first
    assert torch.equal(second, source)
    snapshot.begin()
    mine = snapshot.allocate(1000, torch.float32)
    assert snapshot.allocate(1000, torch.float32).data_ptr() != mine.data_ptr()
    snapshot.begin()
    again = [snapshot.allocate(500, torch.float64).data_ptr() for _ in range(2)]
    assert mine.data_ptr() in again


def test_one_job_at_a_time():
    background, order, go = Background(), [], threading.Event()
    background.start("one", lambda: (go.wait(60), order.append(1)))
    assert background.busy
    threading.Timer(0.01, go.set).start()
    background.start("two", lambda: order.append(2))
    background.wait()
    assert order == [1, 2]
    assert not background.busy


def test_errors_come_with_the_next_call():
    background = Background()

    def fail():
        raise CheckpointError("rank 0: /x: No space left")

    background.start("saving 'a'", fail)
    with pytest.raises(CheckpointError, match=r"saving 'a', which ran in the background, failed: rank 0: /x"):
        background.start("b", lambda: None)
    background.start("c", lambda: {}["gone"])
    with pytest.raises(KeyError):
        background.wait()
    background.wait()
