"""The benchmark of LoRA over int4 weights runs at its tiny shape."""

from __future__ import annotations

import contextlib
import io
import json

from benchmarks.gpu_linear import main
from tests.harness import ranks


@ranks(1)
def test_tiny():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["--tiny", "--steps", "2"]) == 0
    int4, bf16, ratio = (json.loads(line) for line in out.getvalue().splitlines() if line.startswith("{"))
    assert int4["weights_gib"] < bf16["weights_gib"]
    assert abs(int4["losses"][0] - bf16["losses"][0]) < 0.1
    assert ratio["int4_of_bf16"] > 0
