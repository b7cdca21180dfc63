"""`--compile-kernels`: what tests launch in Triton's interpreter is compiled for GPUs, without one.

The interpreter runs code that the compiler refuses. Each process of a run notes what its tests launch; at the end one
process compiles a few of the launches of each kernel for every compute capability below.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
CAPABILITIES = (80, 90)
E4M3 = 89
"""The first capability for which Triton knows it."""
EACH = 3
"""Launches of a kernel that are compiled, spread over its dtypes and constants."""
NOTED: dict[str, bytes] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--compile-kernels", action="store_true", help="compile for GPUs what tests launch interpreted")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--compile-kernels") or os.environ["TRITON_INTERPRET"] != "1":
        return
    from deepspeed.ops import precompile

    launched = precompile.launch

    def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        launched(kernel, grid, *args, **options)
        if getattr(getattr(kernel, "fn", None), "__module__", "").startswith("deepspeed."):  # else a stand-in of a test
            note(kernel.fn, args, options)

    precompile.launch = launch


def note(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Keep a launch unless one that is compiled to the same was kept."""
    given = [_form(value) for value in args], {name: _form(value) for name, value in options.items()}
    kinds = [_kind(value) for value in given[0]], {name: _kind(value) for name, value in given[1].items()}
    key = f"{function.__module__}:{function.__name__} {kinds}"
    if key not in NOTED:
        NOTED[key] = pickle.dumps((function.__module__, function.__name__, *given))


def _form(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _kind(value: Any) -> Any:
    """What Triton's code of a value depends on."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    whole = isinstance(value, int) and not isinstance(value, bool)
    return (value == 1, value % 16 == 0) if whole else value


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["launches"] = NOTED
    elif NOTED:
        with tempfile.NamedTemporaryFile(suffix=".launches") as file:
            pickle.dump(NOTED, file)
            file.flush()
            code = subprocess.run(
                [sys.executable, "-m", "tests.kernel_compilation", file.name],
                env={**os.environ, "TRITON_INTERPRET": "0"},
                cwd=ROOT,
                check=False,
            ).returncode
        if code != 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    NOTED.update(getattr(node, "workeroutput", {}).get("launches", {}))


def reads_e4m3(args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether what launches it asks for devices that know e4m3."""
    of_codecs = options.get("KIND") == 2
    return of_codecs or any(getattr(value, "dtype", None) is torch.float8_e4m3fn for value in args)


def compile_all(rows: dict[str, bytes]) -> list[str]:
    """Compile launches of each kernel; a line that counts them, and the errors."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Driver:
        capability = CAPABILITIES[0]

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", self.capability, 32)

        def get_current_device(self) -> int:
            return self.capability

        def get_current_stream(self, device: int) -> int:
            return 0

    there = Driver()
    driver.set_active(there)
    kernels = defaultdict(list)
    for key in sorted(rows):
        module, name, args, options = pickle.loads(rows[key])
        kernels[module, name].append((args, options))

    def errors(kernel: tuple[tuple[str, str], list[Any]]) -> list[str]:
        (module, name), calls = kernel
        function, found = getattr(importlib.import_module(module), name), []
        for args, options in calls[:: -(-len(calls) // EACH)]:
            if there.capability < E4M3 and reads_e4m3(args, options):
                continue
            waits = {"PDL": True, "launch_pdl": True} if there.capability >= 90 and "PDL" in options else {}
            try:
                function.warmup(*args, grid=(1,), **options | waits)
            except Exception as error:
                found.append(f"{module}.{name}, sm_{there.capability}, {args}, {options}: {error}")
        return found

    failed = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for there.capability in CAPABILITIES:
            failed += [error for each in pool.map(errors, kernels.items()) for error in each]
    counted = f"{len(kernels)} kernels compiled for sm_{', sm_'.join(map(str, CAPABILITIES))}; {len(failed)} failures"
    return [f"\n{counted}", *failed]


if __name__ == "__main__":
    errors = compile_all(pickle.loads(Path(sys.argv[1]).read_bytes()))
    sys.stdout.write("\n".join(errors) + "\n")
    sys.exit(len(errors) > 1)
