"""The example on Ray Serve, with the real package: it answers, replaces a killed server, and leaves nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from deepspeed.launcher.ports import free_port
from tests.clients.server import environment
from tests.harness import ROOT
from tests.projects.stand_ins import needs
from tests.serving import save_model

pytestmark = [needs("ray"), needs("grpc_reflection"), needs("openai"), pytest.mark.slow]

PATIENCE = 300.0  # seconds, only ever reached by a test that fails


def servers(model):
    """The processes of ds_serve with this model, as numbers."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdecimal() else []
        except OSError:  # it ended just now
            continue
        if b"deepspeed.inference.server.cli" in words and str(model).encode() in words:
            found.append(int(entry.name))
    return found


def until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def ask(address):
    """The other example, as a client; whether it got what it wants."""
    words = [sys.executable, str(ROOT / "examples/serve/ask.py"), f"--address={address}", "--count=2"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.returncode == 0 and "the same as a stream:\nequal\n" in done.stdout


def test_ray_serve(tmp_path):
    model = save_model(tmp_path / "model")
    script = [str(ROOT / "examples/serve/ray_serve.py"), str(model), f"--port={free_port()}", "--max-context=200"]
    with tempfile.TemporaryDirectory(prefix="ray") as own:  # names of sockets must be short
        told = {**environment(), "RAY_TMPDIR": own, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
        with (
            (tmp_path / "log").open("w") as log,
            subprocess.Popen([sys.executable, *script], env=told, stdout=subprocess.PIPE, stderr=log, text=True) as ray,
        ):
            try:
                line = next((line for line in ray.stdout if line.startswith("ready at ")), "")
                assert line, (tmp_path / "log").read_text()
                address = re.search(r"http://\S+", line).group()
                assert ask(address)
                (first,) = servers(model)
                engines = Path(f"/proc/{first}/task/{first}/children").read_text().split()
                assert engines
                os.kill(first, signal.SIGKILL)
                until(lambda: not any(Path(f"/proc/{engine}").exists() for engine in engines))
                until(lambda: [each for each in servers(model) if each != first])
                until(lambda: ask(address))
            finally:
                ray.send_signal(signal.SIGINT)
            assert ray.wait(PATIENCE) == 0
    until(lambda: not servers(model))
