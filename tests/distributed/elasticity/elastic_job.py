"""A small elastic training for tests: it records who saw which samples, and a rank may kill itself on the way."""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deepspeed.elasticity import elastic_agent, node
from tests.distributed.launcher.launched import Launched, as_program

STEPS, BATCH, SAMPLES, SAVED = 10, 12, 60, 3  # a checkpoint every 3 steps
PATIENCE = 200.0  # seconds, only ever reached by a test that fails
CONFIG = {
    "elasticity": {"enabled": True, "max_train_batch_size": 12, "micro_batch_sizes": [1, 2], "version": 0.1},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.05}},
}
SCRIPT = """
import json, os, signal, sys, time
import torch
import deepspeed
from deepspeed import comm

folder, deaths = sys.argv[-2], json.loads(sys.argv[-1])  # deaths: step -> rank
torch.manual_seed(1)
inputs = torch.randn({samples}, 4)
wanted = inputs.sin().sum(1, keepdim=True)
torch.manual_seed(2)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
data = torch.utils.data.TensorDataset(torch.arange({samples}), inputs, wanted)
engine, _, loader, _ = deepspeed.initialize(model=model, training_data=data, config=folder + "/config.json")
engine.load_checkpoint(folder + "/checkpoints")
rank, world = comm.get_rank(), comm.get_world_size()
life = torch.tensor([time.time_ns()])
comm.broadcast(life, 0)

def record(**facts):
    line = json.dumps(dict(facts, rank=rank, world=world, life=life.item())) + "\\n"
    file = os.open(folder + "/record", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)

record(begin=engine.global_steps)
seen, losses = [], []
while engine.global_steps < {steps}:
    for index, x, y in loader:
        before = engine.global_steps
        loss = torch.nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        seen += index.tolist()
        losses.append(loss.item())
        step = engine.global_steps
        if step == before:
            continue
        record(step=step, samples=seen, loss=sum(losses) / len(losses))
        seen, losses = [], []
        if deaths.get(str(step)) == rank:
            try:
                os.close(os.open(folder + "/died" + str(step), os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)
            except FileExistsError:
                pass
        if step % {saved} == 0:
            engine.save_checkpoint(folder + "/checkpoints")
        while os.path.exists(folder + "/hold" + str(step)):
            time.sleep(0.05)
        if step == {steps}:
            break
"""


class ElasticJob:
    """The script and its config in a folder; `words` are its arguments, without and with ranks that die."""

    def __init__(self, folder, config=None):
        self.folder = Path(folder)
        self.script = self.folder / "elastic.py"
        self.script.write_text(SCRIPT.format(steps=STEPS, samples=SAMPLES, saved=SAVED))
        self.config = self.folder / "config.json"
        self.config.write_text(json.dumps({**CONFIG, **(config or {})}))

    def words(self, deaths=None):
        return [str(self.script), str(self.folder), json.dumps(deaths or {})]

    def hold(self, step):
        """Let all ranks wait after that step, until the returned file is removed."""
        path = self.folder / f"hold{step}"
        path.touch()
        return path

    def records(self):
        path = self.folder / "record"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def reached(self, step, world):
        """Whether all ranks of a world of that size have done the step."""
        return len([each for each in self.records() if each.get("step") == step and each["world"] == world]) >= world

    def lives(self):
        """Every start of the job of which all ranks came to train, in order."""
        found = {}
        for each in self.records():
            rows = found.setdefault(each["life"], ([], defaultdict(list)))
            (rows[0] if "begin" in each else rows[1][each["step"]]).append(each)
        return [_life(begun, steps) for begun, steps in found.values() if begun and len(begun) == begun[0]["world"]]


@dataclass
class Life:
    """A start of the job: the step after which it began, and what all ranks saw in each further one."""

    world: int
    begin: int
    steps: dict[int, tuple[list[int], float]]  # sorted samples, loss over all ranks


def _life(begun, steps):
    world = begun[0]["world"]
    (begin,) = {each["begin"] for each in begun}
    whole = {step: rows for step, rows in steps.items() if len(rows) == world}
    return Life(world, begin, {step: _joined(rows) for step, rows in whole.items()})


def _joined(rows):
    samples = sorted(sample for row in rows for sample in row["samples"])
    return samples, sum(row["loss"] for row in rows) / len(rows)


@contextmanager
def hurried():
    """Losses are noticed sooner than a busy cluster would like; for launchers that are forked meanwhile."""
    before = node._LAST_CALL, node._BEATS, elastic_agent.SILENCE
    node._LAST_CALL, node._BEATS, elastic_agent.SILENCE = 2, (1, 6), 8.0
    yield
    node._LAST_CALL, node._BEATS, elastic_agent.SILENCE = before


def reference(folder, config=None):
    """What each step of a run without any failure saw, on one rank."""
    job = ElasticJob(folder, config)
    with Launched(job.words(), folder, main=as_program) as run:
        assert run.wait(PATIENCE) == 0, run.errors()
    (life,) = job.lives()
    assert (life.world, life.begin, sorted(life.steps)) == (1, 0, list(range(1, STEPS + 1)))
    return life.steps


def assert_continues(lives, wanted):
    """Every step of every life saw the samples of the run without failures, and had its loss; none was left out."""
    done = 0
    for life in lives:
        assert life.begin % SAVED == 0
        assert life.begin <= done, "it began at a checkpoint that there was"
        assert life.begin >= done // SAVED * SAVED - SAVED, "the newest, or that before if it was not finished"
        assert sorted(life.steps) == list(range(life.begin + 1, life.begin + 1 + len(life.steps)))
        for step, (samples, loss) in life.steps.items():
            assert samples == wanted[step][0], (life.world, step)
            assert abs(loss - wanted[step][1]) < 1e-4, (life.world, step)
        done = max([done, *life.steps])
    assert done == STEPS


def in_order(worlds, wanted):
    """Whether these sizes of the job came in this order; between them a host may have been late."""
    left = iter(worlds)
    return all(any(world == each for each in left) for world in wanted)
