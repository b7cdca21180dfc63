"""The benchmark of attention runs at its tiny shapes."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.gpu_attention import main


def test_tiny(capsys):
    assert main(["--tiny"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["case"] for line in lines] == ["bigbird", "evoformer"]
    assert all(line["ms"] > 0 and line["plain_ms"] > 0 for line in lines)


def test_large_shapes_need_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main([])
    assert "use --tiny" in capsys.readouterr().err
