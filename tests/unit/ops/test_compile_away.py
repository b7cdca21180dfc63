"""Kernels compiled by forked processes: they are in Triton's cache afterwards, and this process compiles none again.

Triton compiles for a GPU that is not there; a process of its own, since here its kernels are interpreted.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import subprocess
import sys

import pytest

from deepspeed.ops import compile_away
from deepspeed.ops.compile_away import workers
from deepspeed.ops.forked import CAN_FORK

# Triton is not imported here: tests that interpret its kernels say so before.
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the package triton is not installed"),
    pytest.mark.skipif(not CAN_FORK, reason="processes that die with their parent: Linux"),
]

SCRIPT = """
import json, os, signal, sys, threading, time
from concurrent.futures import wait
import torch
import triton.compiler.compiler as compiler
from deepspeed.ops import forked
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from deepspeed.log import logger
from deepspeed.ops import rehearsal
from deepspeed.ops.compilation import follow_compilation
from deepspeed.ops.kernels.update import trust_kernel
from deepspeed.ops.vendor_loading import load_vendor

class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)
    def get_current_device(self):
        return 0
    def get_current_stream(self, device):
        return 0

how = sys.argv[1]
driver.set_active(Driver())
follow_compilation()
parent, made = os.getpid(), []
make_ir = compiler.ASTSource.make_ir

def counted(self, *args, **kwargs):
    made.append(self.name)
    if os.getpid() != parent and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "broken":
        raise RuntimeError("no such register")
    return make_ir(self, *args, **kwargs)

compiler.ASTSource.make_ir = counted
told = []
logger.warning = lambda text, *given: told.append(text % given)

def scene(dtype, width):
    partial, found = (torch.empty(4, dtype=dtype, device="meta") for _ in range(2))
    places = torch.empty(4, dtype=torch.int64, device="meta")
    rehearsal.launch(trust_kernel, (1,), partial, places, found, 0.1, 10.0, BLOCK=512, WIDTH=width)

scenes = [lambda: scene(torch.float32, 64), lambda: scene(torch.float32, 128)]
if how != "usual":
    rehearsal.workers = lambda most: most
forked._SILENT_S = 300  # on a machine that does much else
fork_head, loaded = forked._fork_head, threading.Event()

def fork(*given):
    if how == "loading" and not loaded.is_set():
        told.append("forked while a thread opened libraries")
    return fork_head(*given)

forked._fork_head = fork
if how == "loading":
    load_vendor(torch.device("cpu"), [lambda device: (time.sleep(2), loaded.set())])
rehearsed = rehearsal.Rehearsal(torch.device("cpu"), 0 if how == "threads" else 2)
rehearsed.add(scenes)
while rehearsal._BOARD.open:
    wait(list(rehearsal._BOARD.open))
kernels = sum(len(caches[0]) for caches in trust_kernel.device_caches.values())
rehearsed.close()
count = compiler.knobs.compilation.listener.count
print("found " + json.dumps({"made": made, "kernels": kernels, "told": told, "count": count}))
"""


def run(cache, how="forked", **variables):
    given = {**os.environ, "TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0", **variables}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how], env=given, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (line,) = [each for each in done.stdout.splitlines() if each.startswith("found ")]
    return json.loads(line.removeprefix("found "))


def test_what_processes_compile_this_one_only_loads(tmp_path):
    first = run(tmp_path)
    assert list(tmp_path.glob("*/trust_kernel.cubin")), "the cache is filled"
    assert first == {"made": [], "kernels": 2, "told": [], "count": 2}, "compiled elsewhere, loaded and told here"
    again = run(tmp_path)
    assert again == {"made": [], "kernels": 2, "told": [], "count": 0}, "a later start finds all of it"


def test_what_a_killed_process_leaves_is_compiled_here(tmp_path):
    found = run(tmp_path, "killed")
    assert found == {"made": ["trust_kernel"] * 2, "kernels": 2, "told": [], "count": 2}


def test_nothing_is_forked_while_libraries_are_opened(tmp_path):
    assert run(tmp_path, "loading") == {"made": [], "kernels": 2, "told": [], "count": 2}


def test_what_cannot_be_compiled_is_told_once(tmp_path):
    found = run(tmp_path, "broken")
    assert (found["kernels"], len(found["told"])) == (0, 2), f"once for each of two: {found}"
    assert all("no such register" in text for text in found["told"])


def test_threads_compile_where_no_process_is_asked_for(tmp_path):
    assert run(tmp_path, "threads") == {"made": ["trust_kernel"] * 2, "kernels": 2, "told": [], "count": 2}


def test_without_a_cache_threads_compile(tmp_path):
    found = run(tmp_path, "usual", TRITON_ALWAYS_COMPILE="1")
    assert found == {"made": ["trust_kernel"] * 2, "kernels": 2, "told": [], "count": 2}


@pytest.mark.parametrize(
    ("cores", "variables", "expected"),
    [
        (16, {}, 15),
        (64, {}, 20),
        (64, {"LOCAL_WORLD_SIZE": "8"}, 7),
        (16, {"LOCAL_WORLD_SIZE": "8"}, 0),
        (2, {}, 0),
        (16, {"TRITON_ALWAYS_COMPILE": "1"}, 0),
        (16, {"TRITON_CACHE_MANAGER": "triton.runtime.cache:RemoteCacheManager"}, 0),
    ],
)
def test_as_many_processes_as_a_rank_has_cores(monkeypatch, cores, variables, expected):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert workers(20) == expected
    assert workers(4) == min(expected, 4)


def test_a_process_with_much_memory_is_not_copied(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    assert workers(4) == 4
    monkeypatch.setattr(compile_away, "_TOO_MUCH_MEMORY", 1 << 20)
    assert workers(4) == 0


def test_forked_processes_wait_for_the_lock_of_a_key_and_for_no_other():
    read, write = os.pipe()
    locks = compile_away._Locks()
    with locks.held("mine"):
        child = os.fork()
        if child == 0:
            for key in ("other", "mine"):
                with locks.held(key):
                    os.write(write, key[:1].encode())
            os._exit(0)
        assert os.read(read, 1) == b"o"
        waits = select.select([read], [], [], 0.05)[0]
    assert not waits, "held here"
    assert os.read(read, 1) == b"m"
    assert os.waitpid(child, 0) == (child, 0)
    for each in (locks.close, lambda: os.close(read), lambda: os.close(write)):
        each()


def test_kernels_share_the_code_that_launches_them_whatever_their_addresses_lead_to():
    class Source:
        def __init__(self, *types):
            self.signature = dict(enumerate(types))

    bf16, fp32, wide = Source("*bf16", "i32"), Source("*fp32", "i32"), Source("*bf16", "i64")
    assert compile_away._launcher_of(bf16) == compile_away._launcher_of(fp32)
    assert compile_away._launcher_of(bf16) != compile_away._launcher_of(wide)
