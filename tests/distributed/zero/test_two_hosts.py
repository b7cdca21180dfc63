"""The example of two hosts: bytes between them, plain and coded, in network namespaces."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.harness import ROOT
from tests.hosts import TIMEOUT, need

SCRIPT = ROOT / "examples" / "fewer_bytes" / "two_hosts.sh"


def test_fewer_bytes_between_hosts():
    need("tc")
    words = [str(SCRIPT), "stage3", "zeropp", "stage0", "onebit", "--", "--steps", "1", "--width", "256"]
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=3 * TIMEOUT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    between = dict(re.findall(r"^(\w+): .* ([\d.]+) MB to others$", done.stdout, re.MULTILINE))
    sent = {way: float(value) for way, value in between.items()}
    assert sent["stage3"] > 4 * sent["zeropp"] > 0
    assert sent["stage0"] > 10 * sent["onebit"] > 0
