"""`kill -9` of an engine that saves, at random moments: what is left always loads, whole, into another engine."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import struct

import pytest
import torch
import torch.distributed as dist

from deepspeed.utils import safe_get_full_fp32_param
from tests.distributed.checkpoint.test_engine_checkpoints import Mixed, build, train
from tests.harness import ranks
from tests.kills import count, kill_at, killed_at
from tests.models import make

WORDS = struct.Struct("qq")  # the step that was begun, the step that was finished
WAYS = {
    "stage 1": (1, {}),
    "stage 3": (3, {}),
    "safetensors": (2, {"format": "safetensors"}),
    "background": (3, {"writer": {"type": "FAST", "decoupled": True}}),
}


def fill(engine, step):
    """Values by which a mixture of two saves would be seen."""
    with torch.no_grad():
        for param in engine.module.parameters():
            param.fill_(step)


def save_for_ever(engine, folder, step, shared):
    """Every second save goes to the same tag, the others to three in turn."""
    while True:
        fill(engine, step)
        engine.global_steps = step
        shared[: WORDS.size] = WORDS.pack(step, WORDS.unpack(shared[: WORDS.size])[1])
        tag = "same" if step % 2 else f"turn{step // 2 % 3}"
        engine.save_checkpoint(folder, tag=tag, client_state={"step": step})
        # One in the background is known to be written when the next is begun.
        finished = step - 1 if engine._checkpoints.manager.policy.background else step
        shared[: WORDS.size] = WORDS.pack(step, finished)
        step += 1


def loaded(engine, folder):
    """The step of the checkpoint that loads; each of its values is compared."""
    path, client = engine.load_checkpoint(folder)
    if path is None:
        return 0
    step = client["step"]
    assert engine.global_steps == step
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            assert safe_get_full_fp32_param(param).unique().tolist() == [step], name
    return step


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@ranks(1, timeout=300)
def test_a_good_checkpoint_always_loads(way, tmp_path):
    torch.set_num_threads(1)  # a pool of threads would not live on in a child
    stage, section = WAYS[way]
    engine = build(stage, checkpoint=section)
    shared, chance = mmap.mmap(-1, 4096), random.Random(way)

    def trial():
        for number in range(4):
            engine.save_checkpoint(tmp_path / "trial", tag=f"{number}")
        engine._checkpoints.manager.wait()

    train(engine, 0, 1)  # no backward in a child: where torch knows devices its threads would not live on there either
    trial()  # what is imported at the first save need not be imported in every child
    most, torn, step = count(trial), 0, 0
    for _ in range(50):
        number = chance.randrange(1, most)
        assert killed_at(number, lambda step=step: save_for_ever(engine, tmp_path / "runs", step + 1, shared))
        begun, finished = WORDS.unpack(shared[: WORDS.size])
        with contextlib.suppress(FileNotFoundError):
            torn += any(name.startswith(".") for name in os.listdir(tmp_path / "runs"))
        step = loaded(engine, tmp_path / "runs")
        assert finished <= step <= begun, f"step {step} is loaded, {finished} was finished and {begun} begun"
    assert step > 10, "some saves were finished"
    assert torn > 5, "and many interrupted"


@pytest.mark.parametrize("seed", range(4))
def test_both_ranks_are_killed(seed, tmp_path):
    """What loads is one of the last two saves, whole, and training goes on from it."""
    killed = ranks(2)(kill_in_a_save)
    with pytest.raises(pytest.fail.Exception, match="died"):
        killed(folder=tmp_path, seed=seed)
    ranks(2)(load_what_is_there)(folder=tmp_path)


def kill_in_a_save(folder, seed):
    rank, pids = dist.get_rank(), [0, 0]
    dist.all_gather_object(pids, os.getpid())
    engine = build(2)
    step = 0
    while True:
        if step == 3 and rank == 0:
            kill_at(random.Random(seed).randrange(1, 200), [pids[1], pids[0]])
        train(engine, 0, 1)
        step += 1
        engine.save_checkpoint(folder, tag="same" if step % 2 else f"step{step}", client_state={"step": step})
        mark = folder / f"done{rank}"
        mark.with_suffix(".new").write_text(str(step))
        mark.with_suffix(".new").rename(mark)


def load_what_is_there(folder):
    engine = build(3, model=make(Mixed, seed=3))
    path, client = engine.load_checkpoint(folder)
    assert path is not None
    done = min(int((folder / f"done{rank}").read_text()) for rank in range(2))
    assert done <= client["step"] <= done + 2
    assert engine.global_steps == client["step"]
    train(engine, 0, 1)
    engine.save_checkpoint(folder, "after")
