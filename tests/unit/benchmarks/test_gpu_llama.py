"""The script for one CUDA device, as far as it goes without one: sizes, tables, verdicts, failing children."""

from __future__ import annotations

import pytest

from benchmarks import gpu_llama, llama_child
from benchmarks.gpu_llama import parser, start, table, two_rank_lines
from benchmarks.llama_child import SHAPES, Task


def run(step_s=0.3, peak=40.0, start_s=1.0, losses=(10.0, 9.0)):
    return {
        "tokens": 16384,
        "token_flops": 7e9,
        "step_s": step_s,
        "allocated_gib": peak,
        "reserved_gib": peak + 2,
        "alloc_retries": 0,
        "first_start_s": start_s,
        "host_ms": 20.0,
        "losses": list(losses),
    }


def row(found, name):
    return next(line for line in table(found) if line.startswith(name))


def test_the_shape_is_the_one_of_the_target():
    hidden, layers, inner, heads, kv_heads, vocabulary, length, micro_batch = SHAPES["1b"]
    head = hidden // heads
    attention = 2 * hidden * hidden + 2 * hidden * kv_heads * head
    layer = attention + 3 * hidden * inner + 2 * hidden
    assert round((layers * layer + 2 * vocabulary * hidden + hidden) / 1e9, 1) == 1.1
    assert (length, micro_batch) == (4096, 4)


def test_both_files_agree_on_the_mark_and_the_fields():
    assert gpu_llama.MARK == llama_child.MARK
    options = parser().parse_args([])
    sent = {"shape", "device", "steps", "warm_up", "accumulation", "threshold", "deepspeed_path", "curve"}
    assert sent | {"contender", "profile", "breakdown"} == set(Task.__dataclass_fields__)
    assert sent <= set(vars(options))


def test_operations_of_a_token_are_those_of_its_products():
    assert llama_child.token_flops("1b") == pytest.approx(7.03e9, rel=1e-3)


def test_a_contender_has_a_kind_and_a_stage():
    assert (Task("ours:3").kind, Task("ours:3").stage) == ("ours", 3)
    assert (Task("plain").kind, Task("plain").stage) == ("plain", 0)
    assert Task("ours:2-cpu").stage == 2
    assert set(Task("ours:2-cpu").offload) == {"offload_optimizer"}
    assert set(Task("deepspeed:3-both").offload) == {"offload_optimizer", "offload_param"}


@pytest.mark.parametrize(
    ("mine", "verdict"),
    [
        (run(), "  met"),
        (run(step_s=0.31), "NOT MET: speed"),
        (run(peak=40.5), "NOT MET: memory"),
        (run(start_s=3.5), "NOT MET: first start"),
        (run(losses=(10.0, 9.1)), "NOT MET: losses"),
        (run(step_s=0.31, losses=(10.0, 9.1)), "NOT MET: speed, losses"),
    ],
)
def test_targets_are_judged_against_plain_pytorch(mine, verdict):
    assert row({"plain": [run()], "ours:3": [mine]}, "ours:3").endswith(verdict)


@pytest.mark.parametrize(
    ("mine", "verdict"),
    [
        (run(0.31, 38.0, 8.0), "  met"),
        (run(0.33, 38.0, 8.0), "NOT MET: speed"),
        (run(0.31, 39.0, 45.0), "NOT MET: memory, first start"),
    ],
)
def test_compiled_ones_are_judged_against_plain_pytorch_compiled(mine, verdict):
    found = {"plain": [run()], "plain-compiled": [run(0.32, 38.0, 44.0)], "ours:0-fused-compiled": [mine]}
    assert row(found, "ours:0-fused-compiled").endswith(verdict)


def test_medians_over_rounds_with_their_range():
    line = row({"plain": [run()] * 3, "ours:1": [run(0.25), run(0.2), run(0.5)]}, "ours:1")
    assert "65,536" in line
    assert "32,768-81,920" in line
    assert " 1.200 " in line


def test_a_failed_contender_is_said_to_have_failed_and_nothing_is_judged_without_plain():
    assert row({"plain": [run(), None], "ours:0": [run()]}, "plain") == "plain        failed"
    line = row({"ours:0": [run()]}, "ours:0")
    assert "met" not in line.lower()


def test_two_ranks_are_compared_rank_by_rank_with_stage_0():
    base = [run(losses=(5.0, 4.0)), run(losses=(6.0, 5.0))]
    same = [dict(base[0]), dict(base[1])]
    swapped = [base[1], base[0]]
    lines = two_rank_lines({"stage 0": base, "stage 1": same, "stage 2": swapped, "stage 3": [None, None]})
    assert "identical" in lines[2]
    assert "identical" not in lines[3]
    assert lines[4].split() == ["stage", "3", "failed"]


def test_a_child_that_fails_ends_its_peers_and_shows_its_output(tmp_path, monkeypatch, capsys):
    file = tmp_path / "child.py"
    file.write_text("import os, signal\nif os.environ['RANK'] == '0': signal.pause()\nraise SystemExit('it broke')\n")
    monkeypatch.setattr(gpu_llama, "CHILD", file)
    assert start("ours:1", parser().parse_args([]), ranks=2) == [None, None]
    assert "it broke" in capsys.readouterr().out


def test_a_child_that_is_cut_leaves_its_last_result(tmp_path, monkeypatch, capsys):
    file = tmp_path / "child.py"
    file.write_text(f"import signal\nprint('{gpu_llama.MARK}{{}}', flush=True)\nsignal.pause()\n")
    monkeypatch.setattr(gpu_llama, "CHILD", file)
    assert start("ours:0", parser().parse_args(["--timeout", "3"])) == [{"problem": "no end within 3 s"}]


def test_a_fresh_start_finds_no_compiled_kernel(tmp_path, monkeypatch):
    file = tmp_path / "child.py"
    said = "{k: os.environ.get(k) for k in ('TRITON_CACHE_DIR', 'TORCHINDUCTOR_CACHE_DIR')}"
    file.write_text(f"import json, os\nprint({gpu_llama.MARK!r} + json.dumps({said}))\n")
    monkeypatch.setattr(gpu_llama, "CHILD", file)
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    (usual,), (fresh,) = (start("ours:0", parser().parse_args(given)) for given in ([], ["--fresh"]))
    assert set(usual.values()) == {None}
    assert all("gpu-llama-" in folder for folder in fresh.values()), f"{fresh} outlive the process"


def test_a_childs_result_arrives_with_its_task(tmp_path, monkeypatch):
    file = tmp_path / "child.py"
    file.write_text(f"import os, sys\nprint({gpu_llama.MARK!r} + sys.argv[1])\n")
    monkeypatch.setattr(gpu_llama, "CHILD", file)
    (result,) = start("ours:3", parser().parse_args(["--steps", "7"]), threshold=0)
    assert (result["contender"], result["steps"], result["threshold"]) == ("ours:3", 7, 0)
    assert set(result) <= set(Task.__dataclass_fields__)
