"""Experiments: short runs of the user's script under the launcher, each watched until it has measured, died or hung."""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from deepspeed.autotuning.utils import get_val_by_key, read_json, with_values
from deepspeed.config.autotuning import DeepSpeedAutotuningConfig
from deepspeed.errors import UsageError, printable
from deepspeed.launcher import processes
from deepspeed.launcher.output import last_lines
from deepspeed.launcher.supervise import kill_below
from deepspeed.log import logger
from deepspeed.planning.sources import NAMES
from deepspeed.profiling.autotuning import PROGRESS, write_whole

RESULT, METRICS, MODEL_INFO = "result.json", "metrics.json", "model_info.json"
_MEMORY = re.compile(
    rb"OutOfMemoryError|out of memory|MemoryError|can't allocate memory|Cannot allocate memory|"
    rb"was killed by SIGKILL|ALLOC_FAILED",
    re.IGNORECASE,
)
_TICK = 0.1
_FAREWELL = 20.0  # seconds that a run gets to end by itself
_LEAST_PATIENCE = 60.0  # of runs after the first, beside a multiple of what that was silent for
_MOST_TEXT = 1 << 20


class Ending(str, Enum):
    """How a run ended."""

    MEASURED = "measured"
    MEMORY = "out of memory"
    HUNG = "hung"
    SHORT = "ended early"
    FAILED = "failed"


class BudgetSpent(UsageError):
    """The minutes of `--budget` are over; what was measured stays."""


@dataclass(frozen=True)
class Experiment:
    """One run: its folder's name, its config, and how much work a micro step of it is."""

    name: str
    config: Mapping[str, Any]
    work: int
    """Samples of one rank in a step."""


@dataclass(frozen=True)
class Outcome:
    """What a run showed."""

    ending: Ending
    seconds: float
    metrics: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    silence: float = 0.0
    """Longest time without a step, the start included."""
    key: str = ""


class ResourceManager:
    """Runs experiments one after the other on all devices of the job; results on disk are not measured again."""

    def __init__(self, job: TunedJob, config: DeepSpeedAutotuningConfig, deadline: float | None = None) -> None:
        self._job, self._config, self._deadline = job, config, deadline
        self.results, self._exps = Path(config.results_dir).resolve(), Path(config.exps_dir).resolve()
        self._longest: tuple[float, int] | None = None
        self._digest = job.digest

    def run(self, experiment: Experiment, *, model_info: bool = False) -> Outcome:
        """Its outcome, from disk if it is known there."""
        folder = self.results / experiment.name
        goal = folder / (MODEL_INFO if model_info else METRICS)
        own = self._section(goal, model_info=model_info)
        config = with_values(experiment.config, {f"autotuning.{name}": value for name, value in own.items()})
        words = self._job.command(folder / "ds_config.json", config, self._config.arg_mappings or {})
        key = hashlib.sha256((json.dumps(config, sort_keys=True) + self._digest).encode()).hexdigest()
        outcome = self._known(folder, key)
        if outcome is None:
            self._prepare(folder, experiment, config, words)
            outcome = self._measure(folder, experiment, words, goal, key)
            write_whole(folder / RESULT, asdict(outcome))
        if outcome.ending is Ending.MEASURED:
            self._longest = max(self._longest or (0.0, 1), (outcome.silence, experiment.work))
        return outcome

    def _section(self, goal: Path, *, model_info: bool) -> dict[str, Any]:
        """What the engine of the run reads."""
        window = {name: getattr(self._config, name) for name in ("start_profile_step", "end_profile_step")}
        found = {"enabled": True, **window, "metric_path": str(goal.with_name(METRICS))}
        return {**found, "model_info_path": str(goal), "model_info": {"profile": True}} if model_info else found

    def _known(self, folder: Path, key: str) -> Outcome | None:
        values = read_json(folder / RESULT)
        if values is None or values.get("key") != key:
            return None
        try:
            return Outcome(**{**values, "ending": Ending(values["ending"])})
        except (TypeError, ValueError, KeyError):
            return None

    def _prepare(self, folder: Path, experiment: Experiment, config: Mapping[str, Any], words: list[str]) -> None:
        if folder.exists():
            shutil.rmtree(folder)  # of a run that was cut off, or of other settings
        folder.mkdir(parents=True)
        self._exps.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "ds_config.json", config)
        facts = {"name": experiment.name, "num_nodes": self._job.nodes, "num_gpus": self._job.world}
        for file in (folder / "exp.json", self._exps / f"{experiment.name}.json"):
            write_whole(file, {**facts, "ds_config": config})
        (folder / "cmd.txt").write_text(f"deepspeed {shlex.join(words)}\n", encoding="utf-8")

    def _measure(self, folder: Path, experiment: Experiment, words: list[str], goal: Path, key: str) -> Outcome:
        began = time.monotonic()
        before = processes.descendants(os.getpid())
        processes.adopt_orphans()
        with open(folder / "stdout.log", "wb") as out, open(folder / "stderr.log", "wb") as err:
            process = subprocess.Popen(
                self._job.program(words),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=processes.end_with_parent(),
            )
            try:
                code, silence = self._watch(process, goal, self._patience(experiment))
            finally:
                _stop(process)
                kill_below(before)
                processes.adopt_orphans(False)
        metrics, seconds = read_json(goal), time.monotonic() - began
        if metrics is not None:
            return Outcome(Ending.MEASURED, seconds, metrics, silence=silence, key=key)
        ending, reason = self._diagnosis(folder, code, silence)
        return Outcome(ending, seconds, reason=reason, silence=silence, key=key)

    def _patience(self, experiment: Experiment) -> float:
        """A run that does more per step than the slowest so far may be silent for as much longer."""
        if self._longest is None:
            return self._config.patience
        silence, work = self._longest
        return min(self._config.patience, _LEAST_PATIENCE + 10 * silence * max(1.0, experiment.work / work))

    def _watch(self, process: subprocess.Popen[bytes], goal: Path, patience: float) -> tuple[int | None, float]:
        """The exit status, None of a run that hangs, and the longest time without a step."""
        last, longest, steps, done = time.monotonic(), 0.0, None, 0.0
        while True:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(_TICK)
                return code, max(longest, time.monotonic() - last)
            now = time.monotonic()
            if (told := _steps(goal)) != steps:
                longest, last, steps = max(longest, now - last), now, told
            if goal.exists():
                done = done or now
                if now - done > _FAREWELL:  # it has measured: whatever keeps it is of no interest
                    return 0, longest
            elif now - last > patience:
                return None, now - last
            elif self._deadline is not None and now > self._deadline:
                raise BudgetSpent("the minutes of --budget are over")

    def _diagnosis(self, folder: Path, code: int | None, silence: float) -> tuple[Ending, str]:
        steps, window = _steps(folder / METRICS), self._config.end_profile_step + 1
        script = self._job.script
        unread = (
            f"{script} built no engine with the config of this run. It has to give deepspeed.initialize what its "
            "option for the config names: args=args, or config=args.deepspeed_config"
        )
        if code is None:
            where = unread if steps is None else f"{steps} steps were over, and {window} are needed"
            return Ending.HUNG, f"no optimizer step for {silence:.0f} s, so that it was ended; {where}"
        if code == 0:
            if steps is None:
                return Ending.SHORT, f"it ended with status 0 and measured nothing: {unread}"
            return Ending.SHORT, (
                f"it ended after {steps} optimizer steps, and the window ends with step {window}: train longer, or "
                "lower autotuning.end_profile_step"
            )
        files = [folder / name for name in ("stderr.log", "stdout.log")]
        if any(_MEMORY.search(_end_of(file)) for file in files):
            return Ending.MEMORY, "a rank ran out of memory"
        lines = [line for file in files for line in last_lines(str(file), 0)][-12:]
        said = "\n".join(map(printable, lines)) if lines else "it printed nothing"
        return Ending.FAILED, f"the launcher {processes.describe_exit(code)}; {said}"


def _steps(goal: Path) -> int | None:
    """Optimizer steps that a run has taken; None until it has built an engine."""
    try:
        text = goal.with_name(METRICS).with_suffix(PROGRESS).read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    return int(text) if text.isdigit() else 0


def _end_of(file: Path) -> bytes:
    with open(file, "rb") as data:
        data.seek(max(0, file.stat().st_size - _MOST_TEXT))
        return data.read()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the launcher, which ends its ranks, here and on other hosts."""
    if process.poll() is None:
        logger.info("ending the run of pid %d", process.pid)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_FAREWELL)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


_OPTIONS = ("--deepspeed_config", "--deepspeed")


@dataclass(frozen=True)
class TunedJob:
    """A command line of `deepspeed`, taken apart."""

    launcher: tuple[str, ...]
    """Options of the launcher, without those of the tuner."""
    script: str
    words: tuple[str, ...]
    """Arguments of the script."""
    nodes: int
    world: int
    plain: bool
    """The script is a file that Python runs."""

    @classmethod
    def of(cls, args: argparse.Namespace, nodes: int, world: int) -> TunedJob:
        """The job of a parsed command line."""
        own = argparse.ArgumentParser(add_help=False)
        own.add_argument("--autotuning")
        own.add_argument("--budget")
        launcher = own.parse_known_args(args.launcher_words)[1]
        plain = not (args.module or args.no_python)
        return cls(tuple(launcher), args.user_script, tuple(args.user_args), nodes, world, plain)

    @property
    def config(self) -> str:
        """The file that the script's option names."""
        place, before = self._place()
        return self.words[place][len(before) :]

    def _place(self) -> tuple[int, str]:
        """Which word has the name of the config, and what of the word comes before it."""
        for place, before in (each for option in _OPTIONS for each in _values(self.words, option)):
            if ".json" in self.words[place]:
                return place, before
        raise UsageError(
            f"--autotuning: no argument of {self.script} names a config. Expected --deepspeed_config FILE.json, or "
            "--deepspeed FILE.json as scripts on Transformers take it; the tuner puts the config of each run there"
        )

    def argument(self, option: str) -> str | None:
        """The value of an option of the script."""
        return next((self.words[place][len(before) :] for place, before in _values(self.words, option)), None)

    def command(self, file: Path, config: Mapping[str, Any], mappings: Mapping[str, str]) -> list[str]:
        """What follows `deepspeed` for the job with the config in this file; mapped options have its values."""
        words = list(self.words)
        place, before = self._place()
        words[place] = f"{before}{file}"
        for key, option in mappings.items():
            value = get_val_by_key(config, key)
            if value is not None and not isinstance(value, (dict, list)):
                _set_option(words, option, str(value))
        return [*self.launcher, self.script, *words]

    def program(self, command: Sequence[str]) -> list[str]:
        """The command with the interpreter of this process."""
        return [sys.executable, "-u", "-m", "deepspeed.launcher.runner", *command]

    @property
    def digest(self) -> str:
        """Of what a result belongs to: another script, other arguments or other ranks have other results."""
        text = Path(self.script).read_bytes() if self.plain else b""
        rest = repr((self.launcher, self.script, self.words, self.nodes, self.world)).encode()
        return hashlib.sha256(rest + text).hexdigest()

    def shows_model(self) -> bool:
        """Whether the script has a function that builds its model, as the planner looks for it, and trains as main."""
        if not self.plain:
            return False
        try:
            body = ast.parse(Path(self.script).read_bytes()).body
        except (OSError, SyntaxError):
            return False
        return any(isinstance(node, ast.FunctionDef) and node.name in NAMES for node in body)


def _set_option(words: list[str], option: str, value: str) -> None:
    place, before = next(_values(words, option), (len(words) + 1, ""))
    words += [option, ""] if place > len(words) else []
    words[place] = f"{before}{value}"


def _values(words: Sequence[str], option: str) -> Iterator[tuple[int, str]]:
    """The words with values of an option, and what of each comes before the value."""
    for place, word in enumerate(words):
        if word == option and place + 1 < len(words):
            yield place + 1, ""
        elif word.startswith(f"{option}="):
            yield place, f"{option}="
