"""Compiled libraries: built once, whole or not at all, told once when they cannot be."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from deepspeed.errors import OpUnavailable
from deepspeed.ops import capability, native
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.native import _outcome, library
from deepspeed.ops.registry import operations

SCRIPT = """#!/bin/sh
[ "$1" = --version ] && echo "pretended 1.0" && exit 0
echo "$$" >> {log}
for argument; do last=$argument; done
{act}
cp {real} "$last"
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A cache of the test's own."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    _outcome.cache_clear()
    yield tmp_path / "extensions" / "deepspeed_native"
    _outcome.cache_clear()


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A compiler that takes no time: what the real one made is copied. `act` is a line of its script."""
    _outcome.cache_clear()  # an earlier test may have loaded one from a folder that is gone
    real = library("host_update")._name
    log = tmp_path / "compiled"

    def make(act=""):
        script = tmp_path / "cxx"
        script.write_text(SCRIPT.format(log=log, act=act, real=real))
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        _outcome.cache_clear()
        return log

    return make


def runs(log):
    return len(log.read_text().splitlines()) if log.exists() else 0


def names(folder):
    return sorted(path.suffix for path in folder.iterdir())


def test_a_library_is_built_once(compiler, place):
    log = compiler()
    assert isinstance(library("host_update"), ctypes.CDLL)
    _outcome.cache_clear()
    library("host_update")
    assert runs(log) == 1
    assert names(place) == [".lock", ".so"]
    assert place.stat().st_mode & 0o777 == 0o700


def forked(act):
    """The process number of a child that does it, in a session of its own."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    status = 1
    try:
        act()
        status = 0
    finally:
        os._exit(status)


def test_processes_that_start_together_build_once(compiler, place):
    log = compiler("sleep 0.2")
    children = [forked(lambda: library("host_update").host_adam) for _ in range(3)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert runs(log) == 1


def test_a_build_that_is_killed_hinders_nobody(compiler, place):
    log = compiler('echo half > "$last"; sleep 60')
    child = forked(lambda: library("host_update"))
    while not runs(log):
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    compiler()
    assert library("host_update").host_adam
    (left,) = place.glob("*.unfinished")
    os.utime(left, (0, 0))
    next(place.glob("*.so")).unlink()
    _outcome.cache_clear()
    library("host_update")
    assert names(place) == [".lock", ".so"]  # the next build clears away what is old


def test_a_lock_that_is_held_does_not_hang(compiler, place, monkeypatch):
    log = compiler()
    library("host_update")
    made = next(place.glob("*.so"))
    made.unlink()
    monkeypatch.setattr(native, "_PATIENCE_S", 0.1)
    _outcome.cache_clear()
    with native._turn(made.with_suffix(".lock")):
        library("host_update")
    assert runs(log) == 2


def test_a_damaged_library_is_built_again(compiler, place):
    log = compiler()
    place.mkdir(parents=True, mode=0o700)
    (place / f"{native.recipes('host_update')[0].key}.so").write_bytes(b"\x7fELF and no more")
    assert library("host_update").host_adam
    assert runs(log) == 1


def test_a_failure_says_which_compiler_and_what_it_said(compiler, place):
    log = compiler("echo one >&2; echo 'no such thing' >&2; exit 3")
    for _ in range(2):
        with pytest.raises(OpUnavailable, match=r"(?s)cxx -O3 .* failed with exit code 3:.*no such thing"):
            library("host_update")
    assert runs(log) <= 2  # for this processor, and for any; never again
    assert names(place) == [".lock"] * runs(log)


def test_a_compiler_that_does_not_know_the_processor_compiles_for_any(compiler, place):
    log = compiler('case "$*" in *=native*) exit 1;; esac')
    assert library("host_update").host_adam
    assert runs(log) == len(native.recipes("host_update"))


def test_without_a_compiler_the_reason_is_told(place, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(native, "has_cxx_compiler", capability.Capability("", capability.has_cxx_compiler._probe))
    with pytest.raises(OpUnavailable, match="CXX=no-such-compiler is no program; install"):
        library("host_update")


def test_a_folder_of_others_is_not_trusted(compiler, place):
    compiler()
    place.mkdir(parents=True)
    place.chmod(0o777)
    with pytest.raises(OpUnavailable, match=r"mode 777; it must be yours"):
        library("host_update")


def test_without_a_place_to_keep_it_a_library_is_built_for_the_process(compiler, monkeypatch, tmp_path):
    log = compiler()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    assert library("host_update").host_adam
    assert runs(log) == 1


def test_the_users_cache_is_the_place(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.folder() == tmp_path / "deepspeed" / "native"


def test_the_key_knows_processor_compiler_and_sources(monkeypatch, tmp_path):
    keys = [each.key for each in native.recipes("host_update")]
    monkeypatch.setattr(native, "_processor", lambda: "flags : sse")
    keys.append(native.recipes("host_update")[0].key)
    monkeypatch.setattr(native, "_version", lambda compiler: "another")
    keys.append(native.recipes("host_update")[0].key)
    for path in native.SOURCES.iterdir():
        Path(tmp_path, path.name).write_text(path.read_text())
    Path(tmp_path, "codes.h").write_text("changed")
    monkeypatch.setattr(native, "SOURCES", tmp_path)
    keys.append(native.recipes("host_update")[0].key)
    assert len(set(keys)) == len(keys)


def test_an_optimizer_works_without_a_library(place, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "/bin/false")
    found = operations()["cpu_adam"]
    found.forget()
    try:
        param = torch.nn.Parameter(torch.ones(4))
        param.grad = torch.ones(4)
        with caplog.at_level("WARNING", logger="deepspeed"):
            for _ in range(2):
                DeepSpeedCPUAdam([param]).step()
    finally:
        found.forget()
    assert param[0] < 1
    (told,) = [record.getMessage() for record in caplog.records]
    assert "implementation native could not be loaded" in told
    assert "/bin/false" in told
