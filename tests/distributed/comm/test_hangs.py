"""Real faults between ranks: who is at fault, what it should have entered and where it is, on every survivor."""

import os
import re
import signal
import threading
from pathlib import Path

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.comm.watch import HangSettings
from deepspeed.comm.watch.inquiry import ReportBuilder
from deepspeed.comm.watch.report import WaitingCall
from deepspeed.comm.watch.threads import active_calls
from tests.hanging import TIMEOUT, die_with_parent, linger, play
from tests.harness import ranks


def skip(rank):
    if rank == 1:
        linger()
    with dist.labelled("layers.7.mlp.w1"):
        dist.all_reduce(torch.ones(8))


@ranks(1, init=False)
def test_a_rank_that_skips_a_collective():
    said = play(skip, forever=[1])
    for rank in (0, 2):
        assert "rank 1 never entered all_reduce 3 of `layers.7.mlp.w1` on group world; its main thread is in" in (
            said[rank].error
        )
        assert "tests/hanging.py" in said[rank].error
        assert "`threading.Event().wait()`" in said[rank].error
        assert f"all_reduce failed on rank {rank}: collective #3" in said[rank].error
    folder = Path(re.search(r"stacks +: (\S+) has those of 3 ranks", said[0].error)[1])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(file.name for file in folder.iterdir()) == ["rank-0.txt", "rank-1.txt", "rank-2.txt"]
    assert "in linger" in (folder / "rank-1.txt").read_text()


def enter_when_asked(rank):
    """Rank 1 enters the collective while it writes the report that others ask for: they have given up by then."""
    if rank == 1:
        asked, write = threading.Event(), ReportBuilder.report

        def report(reporter, number, waits, stacks=""):
            asked.set()
            while not (inside := active_calls(dist.dispatcher.watch._finders)):
                threading.Event().wait(0.02)
            return write(reporter, number, [WaitingCall(one.call, one.ranks, 0.0, one.place) for one in inside], stacks)

        ReportBuilder.report = report
        asked.wait()
    dist.all_reduce(torch.ones(8))


@ranks(1, init=False)
def test_a_rank_that_enters_after_others_have_given_up():
    said = play(enter_when_asked, settings=HangSettings(timeout=TIMEOUT, warn_after=60, patience=50))
    for rank in (0, 2):
        assert "rank 1 entered all_reduce 3 on group world 2 s later than others, at " in said[rank].error
        assert "is stuck" not in said[rank].text


def swap(rank):
    calls = [lambda: dist.all_reduce(torch.ones(8)), lambda: dist.broadcast(torch.ones(4), 0)]
    for call in reversed(calls) if rank == 1 else calls:
        call()


@ranks(1, init=False)
def test_another_order():
    for one in play(swap):
        assert "ranks differ in operation 3 of group world" in one.error
        assert "rank 1 entered broadcast 3 on group world from rank 0 with float32[4] at" in one.error
        assert "ranks 0, 2 entered all_reduce 3 on group world with float32[8] at" in one.error
        assert "test_hangs.py" in one.error


def smaller(rank):
    dist.all_reduce(torch.ones(3 if rank == 1 else 800))
    dist.barrier()


def larger(rank):
    dist.all_reduce(torch.ones(800 if rank == 1 else 3))
    dist.barrier()


@pytest.mark.parametrize(("fault", "odd", "usual"), [(smaller, 3, 800), (larger, 800, 3)])
@ranks(1, init=False)
def test_another_shape(fault, odd, usual):
    """gloo ends the process of a rank that gets more than it has room for: it tells nothing, its box does."""
    said = play(fault)
    raised = [one for one in said if "CommError" in one.text]
    assert raised
    for one in raised:
        assert "ranks differ in the shape of operation 3 of group world" in one.error
        assert f"rank 1 entered all_reduce 3 on group world with float32[{odd}] at" in one.error
        assert f"ranks 0, 2 entered all_reduce 3 on group world with float32[{usual}] at" in one.error
        assert "test_hangs.py" in one.error


def other_dtype(rank):
    dist.all_reduce(torch.ones(300, dtype=torch.float32 if rank == 1 else torch.float64))
    dist.barrier()


@ranks(1, init=False)
def test_another_dtype():
    raised = [one for one in play(other_dtype) if "CommError" in one.text]
    assert raised
    for one in raised:
        assert "ranks differ in the dtype of operation 3 of group world" in one.error
        assert "rank 1 entered all_reduce 3 on group world with float32[300] at" in one.error


def loop(rank):
    while rank == 1:
        pass
    dist.barrier()


@ranks(1, init=False)
def test_an_endless_loop():
    said = play(loop, forever=[1])
    for rank in (0, 2):
        assert "rank 1 never entered barrier 3 on group world; its main thread is in" in said[rank].error
        assert "`while rank == 1:`" in said[rank].error or "`pass`" in said[rank].error


def native_loop(rank):
    if rank == 1:
        sum(range(10**15))
    dist.barrier()


@ranks(1, init=False)
def test_an_endless_loop_that_lets_no_python_run():
    """Its stacks come by a signal, which the ranks of its host send when it does not answer."""
    said = play(native_loop, forever=[1], settings=HangSettings(timeout=TIMEOUT, patience=8))
    for rank in (0, 2):
        assert "rank 1 does not answer: native code holds the interpreter of its process" in said[rank].error
        assert "the last that it entered is barrier 2 on group world" in said[rank].error
        assert "`sum(range(10**15))`" in said[rank].error


def die(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(8))


@ranks(1, init=False)
def test_a_killed_rank():
    said = play(die)
    assert said[1].status == -signal.SIGKILL
    for rank in (0, 2):
        assert re.search(r"rank 1 is dead: its process \d+ on \S+ was killed or crashed", said[rank].error)
        assert "the last that it entered is barrier 2 on group world at tests/hanging.py" in said[rank].error


def die_first(rank):
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(8))


@ranks(1, init=False)
def test_the_rank_that_keeps_the_store_is_killed():
    said = play(die_first)
    for rank in (1, 2):
        assert "rank 0 is dead: its process" in said[rank].error
        assert "which rank 0 keeps, is gone" in said[rank].error


def stop(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(8))


@ranks(1, init=False)
def test_a_stopped_rank():
    said = play(stop, forever=[1])
    for rank in (0, 2):
        assert re.search(r"rank 1 is stopped: its process \d+ on \S+ got SIGSTOP", said[rank].error)
        assert "the last that it entered is barrier 2 on group world" in said[rank].error


def stop_first(rank):
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(8))


@ranks(1, init=False)
def test_the_rank_that_keeps_the_store_is_stopped():
    said = play(stop_first, forever=[0], settings=HangSettings(timeout=TIMEOUT, patience=2))
    for rank in (1, 2):
        assert "rank 0 is stopped: its process" in said[rank].error


class Stuck(torch.utils.data.Dataset):
    """On rank 1 the third item never comes."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        die_with_parent()
        while index == 2 and os.environ["RANK"] == "1":
            signal.pause()
        return index


def load(rank):
    os.environ["RANK"] = str(rank)
    loader = torch.utils.data.DataLoader(Stuck(), num_workers=1, multiprocessing_context="fork")
    batches = iter(loader)
    for _ in range(len(loader)):
        next(batches)
        dist.all_reduce(torch.ones(8))


@ranks(1, init=False)
def test_a_stuck_data_loader():
    said = play(load, forever=[1])
    for rank in (0, 2):
        assert "rank 1 never entered all_reduce 5 on group world; its main thread is in" in said[rank].error
        assert re.search(r"test_hangs.py:\d+ `next\(batches\)`", said[rank].error)


def save_alone(rank):
    import deepspeed

    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)
    for step in range(3):
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        if step == 1 and rank == 1:
            engine.save_checkpoint(os.devnull)


@ranks(1, init=False)
def test_one_rank_saves_alone():
    said = play(save_alone, forever=[1])
    for rank in (0, 2):
        assert re.search(r"rank 1 (never entered all_reduce|ended with CheckpointError)", said[rank].error)
        assert re.search(r"test_hangs.py:\d+ `engine.save_checkpoint\(os.devnull\)`", said[rank].error)


def fail(rank):
    if rank == 1:
        raise KeyError("no such column")
    dist.all_reduce(torch.ones(8))


@ranks(1, init=False)
def test_an_exception_on_one_rank():
    said = play(fail)
    for rank in (0, 2):
        assert "rank 1 ended with KeyError: 'no such column', raised at" in said[rank].error
        assert re.search(r"test_hangs.py:\d+ `raise KeyError\(\"no such column\"\)`", said[rank].error)


def fail_first(rank):
    if rank == 0:
        raise KeyError("no such column")
    dist.all_reduce(torch.ones(8))


@ranks(1, init=False)
def test_an_exception_on_the_rank_that_keeps_the_store():
    said = play(fail_first)
    for rank in (1, 2):
        assert "rank 0 ended with KeyError: 'no such column', raised at" in said[rank].error


def finish(rank):
    if rank != 1:
        dist.all_reduce(torch.ones(8))


@ranks(1, init=False)
def test_a_rank_that_finishes_early():
    said = play(finish)
    assert said[1].status == 0
    for rank in (0, 2):
        assert "rank 1 has finished its program" in said[rank].error


def come_late(rank):
    if rank == 1:
        while not any("has not completed" in line for line in written()):
            threading.Event().wait(0.02)
    dist.all_reduce(torch.ones(8))


def come_late_to_a_new_group(rank):
    if rank == 1:
        while not any("has not completed" in line for line in written()):
            threading.Event().wait(0.02)
    torch.distributed.new_group([0, 1, 2])


def written():
    """What the other ranks have written so far; all write to one folder."""
    own = Path(os.readlink("/proc/self/fd/1"))
    return [line for file in own.parent.glob("out*") for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    ("fault", "call"),
    # The second is a call that the backend does not count.
    [(come_late, "all_reduce 3 on"), (come_late_to_a_new_group, "torch.distributed.new_group 3 on")],
)
@ranks(1, init=False)
def test_a_slow_rank_is_only_warned_of(fault, call):
    said = play(fault, settings=HangSettings(timeout=100, warn_after=0.5, patience=50))
    assert [one.status for one in said] == [0, 0, 0]
    warnings = [line for one in said for line in one.text.splitlines() if "WARNING" in line]
    assert len(warnings) == 1, "one rank tells it for all"
    assert f"{call} group world has not completed for" in warnings[0]
    assert f"rank 1 has not yet entered {call} group world; its main thread is in" in warnings[0]
    assert "is stuck" not in warnings[0]
    assert "test_hangs.py" in warnings[0]
    assert not any("CommError" in one.text for one in said)
