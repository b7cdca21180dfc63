"""Starts the processes of one measurement, waits for them, and reads their results; leaves none running."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.case import Case, Job, Setting
from benchmarks.child import MARK

__all__ = ["Contender", "MeasurementError", "last_line", "measure", "probe"]

CHILD = Path(__file__).with_name("child.py")

# A launcher's variables would be taken for this run's ranks; the Python ones would change what is imported or cached.
_DROPPED = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE")
_DROPPED_PREFIXES = ("OMPI_", "PMI_", "PMIX_", "SLURM_", "TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_", "LOCAL_WORLD")


class MeasurementError(RuntimeError):
    """A measurement gave no numbers; the message is one line, `output` all that the process said."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


@dataclass(frozen=True)
class Contender:
    """Whose code is measured: an interpreter and its environment variables."""

    name: str
    python: str
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> str:
        return self.name.partition(":")[0]

    @property
    def flavour(self) -> str:
        return self.name.partition(":")[2]


def variables(contender: Contender, extra: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of a child: ours without what would change the measurement."""
    kept = {
        key: value for key, value in os.environ.items() if key not in _DROPPED and not key.startswith(_DROPPED_PREFIXES)
    }
    # Tools that a contender's package brings (ninja, say) lie beside its interpreter.
    kept["PATH"] = os.pathsep.join([str(Path(contender.python).parent), kept.get("PATH", os.defpath)])
    return {**kept, **contender.variables, **extra}


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def last_line(text: str) -> str:
    """The last line that says something; of a traceback, the error itself."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def read_result(text: str) -> Any:
    """The value after the mark, or None."""
    found = [line for line in text.splitlines() if line.startswith(MARK)]
    return json.loads(found[-1][len(MARK) :]) if found else None


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            # Each is the leader of its own group: what it started goes with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(processes: list[subprocess.Popen[bytes]], timeout_s: float) -> str:
    """Wait for all; the first failure or the end of time stops the wait. Returns what went wrong, or nothing."""
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                return f"rank {rank} ended with code {code}"
        if all(code == 0 for code in codes):
            return ""
        if time.monotonic() > deadline:
            running = [rank for rank, code in enumerate(codes) if code is None]
            return f"ranks {running} still ran after {timeout_s:.0f} s"
        time.sleep(0.01)


def _run(
    contender: Contender, commands: list[tuple[list[str], dict[str, str]]], folder: Path, timeout_s: float
) -> list[Any]:
    """Run one process per command side by side; their results in order."""
    processes: list[subprocess.Popen[bytes]] = []
    outputs = [folder / f"output.{rank}" for rank in range(len(commands))]
    try:
        for output, (arguments, extra) in zip(outputs, commands, strict=True):
            with output.open("wb") as sink:
                processes.append(
                    subprocess.Popen(
                        [contender.python, str(CHILD), *arguments],
                        cwd=folder,
                        env=variables(contender, extra),
                        stdin=subprocess.DEVNULL,
                        stdout=sink,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        problem = _wait(processes, timeout_s)
    except OSError as error:
        raise MeasurementError(f"cannot start {Path(contender.python).name}: {error.strerror}") from error
    finally:
        _end(processes)
    texts = [output.read_text(errors="replace") for output in outputs]
    if problem:
        # the rank that failed first is the one whose output explains it
        failed = next((rank for rank, process in enumerate(processes) if (process.returncode or 0) > 0), 0)
        raise MeasurementError(f"{problem}: {last_line(texts[failed])}", texts[failed])
    results = [read_result(text) for text in texts]
    if any(result is None for result in results):
        raise MeasurementError("ended without a result")
    return results


def probe(contender: Contender, timeout_s: float = 300.0) -> dict[str, str]:
    """What the contender imports as torch and deepspeed; also fills the file cache before anything is timed."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        found = _run(contender, [(["probe", contender.environment], {})], Path(folder), timeout_s)[0]
    return {str(key): str(value) for key, value in found.items()}


def measure(case: Case, setting: Setting, contender: Contender) -> dict[str, float]:
    """One measurement in fresh processes, one per rank."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        shared = {
            "WORLD_SIZE": str(setting.ranks),
            "LOCAL_SIZE": str(setting.ranks),
            "LOCAL_WORLD_SIZE": str(setting.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            # every contender gets the same share of the machine
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // setting.ranks)),
        }
        commands = []
        for rank in range(setting.ranks):
            job = Job(
                contender=contender.environment,
                flavour=contender.flavour,
                rank=rank,
                ranks=setting.ranks,
                parameters=dict(setting.parameters),
                folder=folder,
            )
            extra = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            commands.append(([case.file, json.dumps(asdict(job))], extra))
        results = _run(contender, commands, Path(folder), case.timeout_s)
    return combine(case, results)


def combine(case: Case, results: list[dict[str, float]]) -> dict[str, float]:
    """One number per measure: the worst among the ranks that reported it."""
    declared = {measure.name for measure in case.measures}
    unknown = {name for result in results for name in result} - declared
    if unknown:
        raise MeasurementError(f"{case.name} reported {sorted(unknown)}, which it does not declare")
    combined = {}
    for measure in case.measures:
        values = [float(result[measure.name]) for result in results if measure.name in result]
        if values:
            combined[measure.name] = measure.worst(values)
    return combined
