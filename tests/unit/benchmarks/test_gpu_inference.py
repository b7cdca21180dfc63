"""The script about generation, with tiny models on the CPU: every part prints its rows."""

from __future__ import annotations

import json
import time

from benchmarks import gpu_inference
from benchmarks.inference_bench import GOALS
from tests.harness import ranks

LARGER = {"decode 32", "decode 256", "decode 32 plain", "fp8 32", "experts 32"}  # batches that are not tiny


@ranks(1, init=False)
def test_every_part(tmp_path):
    chosen = ",".join(gpu_inference.PARTS)
    assert gpu_inference.main(["--out", str(tmp_path), "--tiny", "--parts", chosen]) == 0
    rows = json.loads((tmp_path / "inference.json").read_text())
    assert GOALS.keys() - rows.keys() == LARGER
    assert rows["speculation, times as fast"]["tokens_a_step"] > "1.5"
    drawn = (tmp_path / "inference.svg").read_text()
    assert drawn.count("<circle") == 9
    assert "experts" in drawn


def test_parts_that_fail_or_are_late_are_told(tmp_path, monkeypatch, capsys):
    def fail(_bench):
        raise ValueError("no such kernel")

    parts = {"late": (lambda _bench: time.sleep(60), 1.5), "bad": (fail, 5.0), "good": (lambda b: b.row("x", 1), 5.0)}
    monkeypatch.setattr(gpu_inference, "PARTS", parts)
    assert gpu_inference.main(["--out", str(tmp_path), "--tiny", "--parts", "late,bad,good"]) == 1
    rows = json.loads((tmp_path / "inference.json").read_text())
    assert rows["late"] == {"failed": "TimeoutError('late took longer than 2 s')"}
    assert "no such kernel" in rows["bad"]["failed"]
    assert rows["x"]["tokens/s"] == 1
