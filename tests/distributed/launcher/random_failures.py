"""Launches in which one rank fails at a random moment, in a random way: is the exit code right, is any process left?

    python -m tests.distributed.launcher.random_failures --count 100

runs the `deepspeed` command itself so many times, one after another; the suite does the same with a few seeds.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

MARK = "LAUNCH_MARK"
SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGABRT, signal.SIGFPE)
SCRIPT = """
import os, signal, subprocess, sys, threading, time
rank, facts = int(os.environ["RANK"]), {facts!r}
if facts["children"]:
    subprocess.Popen(["sleep", "1000"])
if facts["daemons"] and os.fork() == 0:
    os.setsid()
    while True:
        signal.pause()
if facts["noise"]:
    def talk():
        while True:
            print("rank", rank, "x" * 200, flush=True)
    threading.Thread(target=talk, daemon=True).start()
if rank == facts["rank"]:
    time.sleep(facts["delay"])
    if facts["signal"]:
        os.kill(os.getpid(), facts["signal"])
    if facts["code"] == 1:
        raise ValueError("this rank fails")
    os._exit(facts["code"])
while True:
    signal.pause() if not facts["noise"] else time.sleep(1000)
"""


@dataclass(frozen=True)
class Trial:
    """One launch: who fails, when and how, and what else its ranks do."""

    world: int
    rank: int
    delay: float
    code: int
    signal: int
    children: bool
    daemons: bool
    noise: bool

    @classmethod
    def of(cls, seed):
        """The trial of a seed."""
        dice = random.Random(seed)
        world = dice.randint(2, 8)
        by_signal = dice.random() < 0.4
        return cls(
            world=world,
            rank=dice.randrange(world),
            delay=dice.choice((0.0, dice.uniform(0, 0.1), dice.uniform(0, 1.0))),
            code=0 if by_signal else dice.choice((1, 2, 7, 41, 137, 255)),
            signal=int(dice.choice(SIGNALS)) if by_signal else 0,
            children=dice.random() < 0.5,
            daemons=dice.random() < 0.3,
            noise=dice.random() < 0.3,
        )

    @property
    def expected(self):
        """The exit code of the command."""
        return 128 + self.signal if self.signal else self.code

    def write(self, folder):
        """The script of the ranks."""
        path = Path(folder) / "script.py"
        path.write_text(SCRIPT.format(facts=self.__dict__))
        return path


def alive(mark):
    """Command lines of the processes that were started with this mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:  # it ended meanwhile, or belongs to somebody else
                continue
    return found


def launch(seed, patience):
    """Run one trial with the command itself, and return what was wrong, or nothing."""
    trial, mark = Trial.of(seed), uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(trial.world)]
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", MARK: mark}
        with (Path(folder) / "log").open("wb") as log:
            done = subprocess.run(
                [*command, str(trial.write(folder))],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=patience,
                check=False,
            )
    left = alive(mark)
    wrong = [] if done.returncode == trial.expected else [f"exit code {done.returncode}, expected {trial.expected}"]
    wrong += [f"left behind: {line}" for line in left]
    return [f"seed {seed} ({trial}): {what}" for what in wrong]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    args = parser.parse_args()
    wrong = []
    began = time.monotonic()
    for seed in range(args.first, args.first + args.count):
        wrong += launch(seed, patience=300)
    for line in wrong:
        sys.stdout.write(line + "\n")
    sys.stdout.write(f"{args.count} launches in {time.monotonic() - began:.0f} s, {len(wrong)} things wrong\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
