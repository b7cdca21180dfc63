"""`kill -9` of an engine that saves, at random moments: what is left always loads, whole, into another engine."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import signal
import struct
import threading
import time

import pytest
import torch
import torch.distributed as dist

from deepspeed.utils import safe_get_full_fp32_param
from tests.distributed.checkpoint.test_engine_checkpoints import Mixed, build, train
from tests.harness import ranks
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
        train(engine, 0, 1)
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
@ranks(1, timeout=120)
def test_a_good_checkpoint_always_loads(way, tmp_path):
    torch.set_num_threads(1)  # a pool of threads would not live on in a child
    stage, section = WAYS[way]
    engine = build(stage, checkpoint=section)
    shared, chance = mmap.mmap(-1, 4096), random.Random(way)
    began = time.monotonic()
    for number in range(4):
        train(engine, 0, 1)
        engine.save_checkpoint(tmp_path / "trial", tag=f"{number}")
    longest = 0.01 + time.monotonic() - began  # of a few saves
    torn, step = 0, 0
    for _ in range(50):
        pid = os.fork()
        if pid == 0:
            try:
                save_for_ever(engine, tmp_path / "runs", step + 1, shared)
            finally:
                os._exit(1)
        time.sleep(chance.uniform(0.001, longest))
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, "it lived until it was killed"
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
    killed = ranks(2, timeout=60)(kill_in_a_save)
    with pytest.raises(pytest.fail.Exception, match="died"):
        killed(folder=tmp_path, seed=seed)
    ranks(2)(load_what_is_there)(folder=tmp_path)


def save_until_killed(folder):
    engine = build(2)
    step = 0
    while True:
        train(engine, 0, 1)
        step += 1
        engine.save_checkpoint(folder, tag="same" if step % 2 else f"step{step}", client_state={"step": step})
        mark = folder / f"done{dist.get_rank()}"
        mark.with_suffix(".new").write_text(str(step))
        mark.with_suffix(".new").rename(mark)


def kill_in_a_save(folder, seed):
    rank, generator = dist.get_rank(), random.Random(seed)
    delay = generator.uniform(0.0, 0.15)

    def strike():
        while not (folder / "done0").exists() or int((folder / "done0").read_text()) < 3:
            time.sleep(0.002)
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGKILL)

    assert rank in (0, 1)
    threading.Thread(target=strike, daemon=True).start()
    save_until_killed(folder)


def load_what_is_there(folder):
    engine = build(3, model=make(Mixed, seed=3))
    path, client = engine.load_checkpoint(folder)
    assert path is not None
    done = min(int((folder / f"done{rank}").read_text()) for rank in range(2))
    assert done <= client["step"] <= done + 2
    assert engine.global_steps == client["step"]
    train(engine, 0, 1)
    engine.save_checkpoint(folder, "after")
