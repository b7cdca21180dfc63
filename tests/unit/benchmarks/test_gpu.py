"""The script that puts the measurements of one device in a row: its parts, its picture, its exit code."""

import json

import pytest

from benchmarks import gpu
from benchmarks.breakdown import KINDS, kind_of, lines

RUN = {
    "losses": [1.0] * 5,
    "tokens": 100,
    "step_s": 0.5,
    "allocated_gib": 1.0,
    "reserved_gib": 2.0,
    "first_start_s": 0.1,
    "host_ms": 3.0,
    "breakdown": {"kinds": dict.fromkeys(KINDS, 1.0), "kernels": [("gemm", 2.0, 1.0)]},
}


def test_what_was_measured_is_told_drawn_and_kept(tmp_path, monkeypatch, capsys):
    asked = []

    def start(contender, options, **changes):
        asked.append((contender, options.shape, options.curve))
        return [{"curve": [2.0, 1.0]} if options.curve else RUN]

    monkeypatch.setattr(gpu.gpu_llama, "start", start)
    assert gpu.main(["--parts", "training,curve,8b", "--output", str(tmp_path), "--curve", "2"]) == 0
    said = capsys.readouterr().out
    assert "ours:0-fused-fp8" in said
    assert "loss, means of 20" in said
    assert {name for name, _, _ in asked} == {*gpu.CONTENDERS, *gpu.CURVES}
    assert ("ours:0-fused", "8b", 0) in asked
    assert set(json.loads((tmp_path / "gpu.json").read_text())) == {"training", "curve", "8b"}
    if (tmp_path / "gpu.png").exists():
        assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")
    else:
        assert "matplotlib is not installed" in said


def test_a_contender_that_fails_is_told_by_the_exit_code(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu.gpu_llama, "start", lambda *_, **__: [None])
    assert gpu.main(["--parts", "training", "--output", str(tmp_path)]) == 1


def test_a_part_that_nobody_knows_is_an_error(capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--parts", "speed"])
    assert "speed is none of kernels" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_tst_128x256_64x4", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "attention"),
        ("void at::native::vectorized_elementwise_kernel<8, add>", "elementwise"),
        ("Memcpy DtoD (Device -> Device)", "copies and casts"),
    ],
)
def test_kernels_are_sorted_by_their_names(kernel, kind):
    assert kind_of(kernel) == kind


def test_the_table_of_kinds_has_a_column_for_each_contender():
    text = lines({"plain": RUN["breakdown"], "ours:0": RUN["breakdown"]}, longest=1)
    assert "plain" in text[0]
    assert "ours:0" in text[0]
    assert text[-1].endswith("gemm")
