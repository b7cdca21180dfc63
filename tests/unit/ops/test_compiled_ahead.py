"""Kernels compiled by threads: they are in Triton's cache afterwards, and a later process compiles none again.

Triton compiles for a GPU that is not there; a process of its own, since here its kernels are interpreted.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

# Triton is not imported here: tests that interpret its kernels say so before.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the package triton is not installed"
)

SCRIPT = """
import json, sys
from concurrent.futures import wait
import torch
import triton.compiler.compiler as compiler
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from deepspeed.log import logger
from deepspeed.ops import precompile
from deepspeed.ops.kernels.update import trust_kernel

class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)
    def get_current_device(self):
        return 0
    def get_current_stream(self, device):
        return 0

driver.set_active(Driver())
precompile.follow_compilation()
made = []
make_ir = compiler.ASTSource.make_ir

def counted(self, *args, **kwargs):
    made.append(self.name)
    if sys.argv[1] == "broken":
        raise RuntimeError("no such register")
    return make_ir(self, *args, **kwargs)

compiler.ASTSource.make_ir = counted
told = []
logger.warning = lambda text, *given: told.append(text % given)

def scene(dtype, width):
    partial, found = (torch.empty(4, dtype=dtype, device="meta") for _ in range(2))
    places = torch.empty(4, dtype=torch.int64, device="meta")
    precompile.launch(trust_kernel, (1,), partial, places, found, 0.1, 10.0, BLOCK=512, WIDTH=width)

rehearsed = precompile.KernelPrecompiler(torch.device("cpu"))
rehearsed.add([lambda: scene(torch.float32, 64), lambda: scene(torch.float32, 128)])
while precompile.PENDING.open:
    wait(list(precompile.PENDING.open))
kernels = sum(len(caches[0]) for caches in trust_kernel.device_caches.values())
rehearsed.close()
count = compiler.knobs.compilation.listener.count
print("found " + json.dumps({"made": made, "kernels": kernels, "told": told, "count": count}))
"""


def run(cache, how="usual", **variables):
    given = {**os.environ, "TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0", **variables}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how], env=given, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (line,) = [each for each in done.stdout.splitlines() if each.startswith("found ")]
    return json.loads(line.removeprefix("found "))


def test_what_threads_compile_is_found_by_a_later_process(tmp_path):
    first = run(tmp_path)
    assert list(tmp_path.glob("*/trust_kernel.cubin")), "the cache is filled"
    assert first == {"made": ["trust_kernel"] * 2, "kernels": 2, "told": [], "count": 2}
    again = run(tmp_path)
    assert again == {"made": [], "kernels": 2, "told": [], "count": 0}, "a later start finds all of it"


def test_what_cannot_be_compiled_is_told_once(tmp_path):
    found = run(tmp_path, "broken")
    assert (found["kernels"], len(found["told"])) == (0, 2), f"once for each of two: {found}"
    assert all("no such register" in text for text in found["told"])


def test_without_a_cache_threads_compile(tmp_path):
    found = run(tmp_path, TRITON_ALWAYS_COMPILE="1")
    assert found == {"made": ["trust_kernel"] * 2, "kernels": 2, "told": [], "count": 2}
