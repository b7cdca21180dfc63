"""Makes the contenders: ours and plain PyTorch share this interpreter, real DeepSpeed gets an environment of its own.

The environment lies in `.bench/`, which git ignores. It counts as made only when its stamp, written last, says how;
anything else is thrown away and made again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.processes import Contender, MeasurementError, last_line, probe

__all__ = ["BENCH", "ROOT", "DeepSpeedEnvironment", "EnvironmentUnavailable", "Step", "assemble", "check"]

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / ".bench"

TORCH = "2.13.0"
DEEPSPEED = "0.19.8"
MEGATRON = "0.16.1"

# The first `init_distributed` of DeepSpeed on a CPU compiles an extension for a minute; done here, it is not measured.
_FIRST_USE = """
import deepspeed
deepspeed.init_distributed("gloo", init_method="file://" + __import__("os").path.abspath("store"), rank=0, world_size=1)
"""

Say = Callable[[str], None]


class EnvironmentUnavailable(RuntimeError):
    """An environment cannot be made; the message is one line."""


@dataclass(frozen=True)
class Step:
    """One command of the recipe."""

    title: str
    command: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    required: bool = True


@dataclass(frozen=True)
class DeepSpeedEnvironment:
    """Real DeepSpeed with the torch that the project pins, on whatever this machine has."""

    folder: Path
    recipe: Sequence[Step] | None = None  # another one, for tests

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def stamp(self) -> Path:
        return self.folder / "made.json"

    @property
    def variables(self) -> dict[str, str]:
        # what it compiles goes with it, and is found again
        return {"TORCH_EXTENSIONS_DIR": str(self.folder / "extensions")}

    def steps(self) -> list[Step]:
        """The recipe. torch comes first and stays pinned, or resolving DeepSpeed would fetch another one."""
        pip = (str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input")
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        return [
            Step("an empty environment", (sys.executable, "-m", "venv", str(self.folder))),
            Step(f"torch {TORCH}", (*pip, f"torch=={TORCH}")),
            # a source distribution: nothing is compiled at installation unless asked for
            Step(
                f"deepspeed {DEEPSPEED}",
                (*pip, f"torch=={TORCH}", f"deepspeed=={DEEPSPEED}"),
                {"DS_BUILD_OPS": "0"},
            ),
            # its datasets are compared with ours; all else that it needs is not
            Step(
                f"megatron-core {MEGATRON}",
                (*pip, "--no-deps", f"torch=={TORCH}", f"megatron-core=={MEGATRON}"),
                required=False,
            ),
            Step(
                "what deepspeed compiles at first use",
                (str(self.python), "-c", _FIRST_USE),
                {**self.variables, **ranks, "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"},
                required=False,
            ),
        ]

    def key(self) -> dict[str, str]:
        """What the stamp must say for the environment to be used as it is."""
        version = ".".join(map(str, sys.version_info[:2]))
        return {"python": version, "torch": TORCH, "deepspeed": DEEPSPEED}

    def is_made(self) -> bool:
        try:
            made = json.loads(self.stamp.read_text())
        except (OSError, ValueError):
            return False
        return isinstance(made, dict) and made.get("key") == self.key() and self.python.exists()

    def ensure(self, say: Say) -> None:
        """Make the environment unless it is there. Quick when it is; a half-made one is made again."""
        if self.is_made():
            return
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self.folder.parent / f"{self.folder.name}.lock"):
            if self.is_made():  # by another run, while this one waited
                return
            if self.folder.exists():
                say(f"removing a half-made or outdated {self.folder.name}")
                shutil.rmtree(self.folder)
            self._make(say)

    def _make(self, say: Say) -> None:
        steps = list(self.recipe) if self.recipe is not None else self.steps()
        seconds: dict[str, float] = {}
        for number, step in enumerate(steps, start=1):
            say(f"making {self.folder.name} ({number} of {len(steps)}): {step.title}")
            start = time.monotonic()
            problem = _run(step)
            seconds[step.title] = round(time.monotonic() - start, 1)
            if problem and step.required:
                raise EnvironmentUnavailable(f"{step.title}: {problem}")
            if problem:
                say(f"{step.title} failed, going on: {problem}")
        self.stamp.write_text(json.dumps({"key": self.key(), "seconds": seconds}, indent=2))
        say(f"made {self.folder.name} in {sum(seconds.values()):.0f} s")


def _run(step: Step) -> str:
    """Run one step; what went wrong, or nothing."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    # a folder of its own: with the project's root as working directory, `python -c` would import our deepspeed
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        try:
            process = subprocess.run(
                step.command,
                cwd=folder,
                env={**inherited, **step.variables},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=1800,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return last_line(str(error))
    return last_line(process.stderr + process.stdout) if process.returncode else ""


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def check(contender: Contender) -> dict[str, str]:
    """The versions that a contender imports; an error where they are not those it stands for."""
    found = probe(contender)
    version = found.get("deepspeed")
    if contender.name == "deepspeed" and version != DEEPSPEED:
        raise EnvironmentUnavailable(f"imports deepspeed {version}, expected {DEEPSPEED}")
    if contender.name == "ours" and version == DEEPSPEED:
        raise EnvironmentUnavailable(f"imports deepspeed {version}, expected the one of this project")
    return found


def assemble(
    names: Sequence[str], pythons: Mapping[str, str], say: Say, bench: Path = BENCH
) -> tuple[list[Contender], dict[str, dict[str, str]], dict[str, str]]:
    """(contenders, their versions, why the others are missing). `pythons` overrides interpreters by name."""
    contenders: list[Contender] = []
    versions: dict[str, dict[str, str]] = {}
    missing: dict[str, str] = {}
    for name in names:
        try:
            variables: dict[str, str] = {}
            python = pythons.get(name, sys.executable)
            if name == "ours":
                variables = {"PYTHONPATH": str(ROOT)}
            elif name == "deepspeed":
                environment = DeepSpeedEnvironment(bench / f"deepspeed-{DEEPSPEED}")
                variables = environment.variables
                if name not in pythons:
                    environment.ensure(say)
                    python = str(environment.python)
            contender = Contender(name, python, variables)
            versions[name] = check(contender)
        except (EnvironmentUnavailable, MeasurementError) as error:
            missing[name] = str(error)
            continue
        contenders.append(contender)
    return contenders, versions, missing
