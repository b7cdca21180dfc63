"""`kill -9` at any moment, for real: processes that save are killed, and what they leave is loaded."""

import contextlib
import mmap
import os
import random
import signal
import struct

import pytest
import torch
import torch.distributed as dist

from deepspeed.checkpoint.formats.safe_load import safe_load
from deepspeed.checkpoint.storage import commit, manifest
from deepspeed.checkpoint.storage.manager import CheckpointManager, FileContent, SavePolicy, SaveRequest
from deepspeed.checkpoint.storage.rank_meeting import SingleRank, StoreExchange
from deepspeed.errors import CheckpointError
from tests.kills import count, killed_at

WORDS = struct.Struct("qq")  # the step that was begun, the step that was finished


def request(folder, step, values):
    """Every second save goes to the same tag, the others to three in turn."""
    tag = "same" if step % 2 else f"turn{step // 2 % 3}"
    values.fill_(step)
    return SaveRequest(folder, tag, {"model.pt": {"step": step, "values": values}, "optim.pt": {"step": step}})


def save_for_ever(folder, step, shared):
    manager = CheckpointManager(SingleRank(), SavePolicy(keep_last=2))
    values = torch.zeros(1000)
    while True:
        shared[: WORDS.size] = WORDS.pack(step, step - 1)
        manager.save(request(folder, step, values))
        shared[: WORDS.size] = WORDS.pack(step, step)
        step += 1


def load(folder):
    """The step of the checkpoint that would be loaded, every byte of which is compared."""
    found = CheckpointManager(SingleRank()).locate(folder)
    if found.tag is None:
        return 0
    assert manifest.verify(found.path) == []
    model, optim = safe_load(found.path / "model.pt"), safe_load(found.path / "optim.pt")
    assert model["step"] == optim["step"]
    assert model["values"].unique().tolist() == [model["step"]]
    return model["step"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["exchange", "two renames"])
def test_a_good_checkpoint_always_loads(tmp_path, monkeypatch, how):
    if how == "two renames":
        monkeypatch.setattr(commit, "_exchange", lambda one, other: False)
    shared, values = mmap.mmap(-1, 4096), torch.zeros(1000)

    def trial():
        for step in range(4):
            CheckpointManager(SingleRank()).save(request(tmp_path / "trial", step, values))

    trial()  # what is imported at the first save need not be imported in every child
    most, chance, torn, step = count(trial), random.Random(how), 0, 0
    for _ in range(120):
        number = chance.randrange(1, most)
        assert killed_at(number, lambda step=step: save_for_ever(tmp_path / "runs", step + 1, shared))
        begun, finished = WORDS.unpack(shared[: WORDS.size])
        with contextlib.suppress(FileNotFoundError):
            torn += any(name.startswith(".") for name in os.listdir(tmp_path / "runs"))
        step = load(tmp_path / "runs")
        assert finished <= step <= begun, f"step {step} is loaded, {finished} was finished and {begun} begun"
    assert step > 10, "some saves were finished"
    assert torn > 10, "and many interrupted"


def one_save(folder, step, number):
    values = torch.zeros(1000)
    asked = SaveRequest(folder, "same", request(folder, step, values).files)
    return killed_at(number, lambda: CheckpointManager(SingleRank(), SavePolicy(keep_last=1)).save(asked))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["exchange", "two renames"])
def test_killed_before_every_act_of_a_save(tmp_path, monkeypatch, how):
    if how == "two renames":
        monkeypatch.setattr(commit, "_exchange", lambda one, other: False)
    folder = tmp_path / "runs"
    assert not one_save(folder, 1, 0)
    step, number = load(folder), 1
    assert step == 1
    while one_save(folder, step + 1, number):
        found = load(folder)
        assert found in (step, step + 1), f"killed before act {number}"
        step, number = found, number + 1
    assert number > 40, "a save acts often"
    assert load(folder) == step + 1
    assert sorted(os.listdir(folder)) == ["latest", "same"]


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_is_killed_while_it_writes(tmp_path, victim):
    """The others raise an error that names it, and the checkpoint of before is what loads."""
    world, folder = 3, tmp_path / "runs"
    CheckpointManager(SingleRank()).save(SaveRequest(folder, "a", {"old": "old"}))

    def die(value, stream):
        stream.write(b"half a file")
        os.kill(os.getpid(), signal.SIGKILL)

    def work(rank, pipe):
        exchange = StoreExchange(dist.FileStore(str(tmp_path / "store"), world), rank, world, wait=2.0)
        files = {f"rank{rank}": FileContent(0, die) if rank == victim else "new"}
        try:
            CheckpointManager(exchange).save(SaveRequest(folder, "a", files))
        except CheckpointError as error:
            os.write(pipe, str(error).encode())

    told = {}
    pipes = {}
    for rank in range(world):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                work(rank, write)
            finally:
                os._exit(0)
        os.close(write)
        pipes[rank] = pid, read
    for rank, (pid, read) in pipes.items():
        told[rank] = os.read(read, 10_000).decode()
        os.waitpid(pid, 0)
        os.close(read)
    assert told.pop(victim) == ""
    for text in told.values():
        assert f"no sign of life from rank {victim} of 3" in text
    found = CheckpointManager(SingleRank()).locate(folder)
    assert (found.path / "old").read_text() == "old"
    CheckpointManager(SingleRank()).save(SaveRequest(folder, "b", {"new": "new"}))
    assert sorted(os.listdir(folder)) == ["a", "b", "latest"], "the next save clears up"
