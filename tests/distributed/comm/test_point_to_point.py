"""Sends, receives and batches of them, also while the comms logger listens."""

import warnings

import pytest
import torch
import torch.distributed as td

from deepspeed import comm as dist
from deepspeed.comm.point_to_point import PeerChannel
from deepspeed.errors import CommError
from tests.harness import ranks


def other():
    return 1 - td.get_rank()


@ranks(2)
def test_send_and_recv():
    warnings.simplefilter("error")
    if td.get_rank() == 0:
        dist.send(torch.tensor([5.0]), 1, tag=3)
        x = torch.zeros(1)
        assert dist.recv(x) == 1  # from anybody
        assert x.item() == 6
    else:
        x = torch.zeros(1)
        assert dist.recv(x, 0, tag=3) == 0
        assert x.item() == 5
        dist.send(torch.tensor([6.0]), 0)


@ranks(2)
@pytest.mark.parametrize("listened", [False, True])
def test_isend_and_irecv_may_cross(listened):
    """Both send before both receive: measuring must not wait where that would wait for ever."""
    dist.configure(enabled=listened)
    x = torch.zeros(2)
    sending = dist.isend(torch.full((2,), float(td.get_rank())), other())
    receiving = dist.irecv(x, other())
    assert receiving.wait()
    assert sending.wait()
    assert x.tolist() == [other()] * 2
    assert dist.get_logged_comm_ops() == (["irecv", "isend"] if listened else [])


@ranks(2)
@pytest.mark.parametrize("listened", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_lines_are_recorded_as_messages_are(listened, whole):
    dist.configure(enabled=listened)
    group = td.group.WORLD if whole else dist.new_group([0, 1])
    line, x = PeerChannel(group, other(), tag=5), torch.zeros(2)
    for number in range(3):
        receiving = line.receive(x, f"what comes {number}")
        sending = line.send(torch.full((2,), 10.0 * number + td.get_rank()), f"what goes {number}")
        assert receiving.wait()
        assert sending.wait()
        assert x.tolist() == [10.0 * number + other()] * 2
    sent, received = dist.recent_operations()[-1], dist.recent_operations()[-2]
    assert (sent.op, sent.p2p, sent.bytes, sent.peer, sent.label) == ("isend", True, 8, other(), "what goes 2")
    assert (received.op, received.peer, received.label) == ("irecv", other(), "what comes 2")
    assert sent.sequence == received.sequence + 1
    assert sent.function == "test_lines_are_recorded_as_messages_are"
    assert sent.returned
    assert dist.get_logged_comm_ops() == (["irecv", "isend"] if listened else [])


@ranks(2)
@pytest.mark.parametrize("listened", [False, True])
@pytest.mark.parametrize("theirs", [False, True])
def test_batches(listened, theirs):
    """`P2POp` takes this package's functions and torch's."""
    warnings.simplefilter("error")
    dist.configure(enabled=listened)
    group = dist.new_group([0, 1])
    source = td if theirs else dist
    x, y = torch.full((2,), float(td.get_rank())), torch.zeros(2)
    ops = [dist.P2POp(source.isend, x, other(), group), dist.P2POp(source.irecv, y, other(), group, tag=0)]
    handles = dist.batch_isend_irecv(ops)
    for handle in handles:
        handle.wait()
    assert y.tolist() == [other()] * 2
    record = dist.recent_operations()[-1]
    assert (record.op, record.tensors, record.bytes, record.p2p) == ("batch_isend_irecv", 2, 16, True)
    assert dist.get_comm_operation_count() == (1 if listened else 0)


@ranks(2)
def test_bad_batches_are_refused():
    with pytest.raises(CommError, match="empty list"):
        dist.batch_isend_irecv([])
    with pytest.raises(ValueError, match="isend"):
        dist.P2POp(torch.add, torch.ones(1), other())


@ranks(3)
def test_global_ranks_in_a_subgroup():
    group = dist.new_group([0, 2])
    x = torch.zeros(1)
    if td.get_rank() == 0:
        dist.send(torch.tensor([9.0]), 2, group)
    elif td.get_rank() == 2:
        assert dist.recv(x, 0, group) == 0
        assert x.item() == 9
