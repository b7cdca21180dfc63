"""The script that puts the measurements of one device in a row: its plan, its limits, its tables, its picture."""

import json
import os
import signal
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from benchmarks import bars, gpu, gpu_marks
from benchmarks.breakdown import KINDS, kind_of, lines

RUN = {
    "losses": [1.0] * 5,
    "tokens": 100,
    "token_flops": 1e9,
    "step_s": 0.5,
    "allocated_gib": 1.0,
    "reserved_gib": 2.0,
    "first_start_s": 0.1,
    "host_ms": 3.0,
    "breakdown": {"kinds": dict.fromkeys(KINDS, 1.0), "kernels": [("gemm", 2.0, 1.0)]},
}


@pytest.fixture
def asked(monkeypatch):
    """Stand-ins for the processes; the list of what they were asked for."""
    found = []

    def start(contender, options, **changes):
        found.append((contender, options.shape, options.curve, options.fresh))
        return [{**RUN, **({"curve": [2.0, 1.0]} if options.curve else {})}]

    monkeypatch.setattr(gpu.gpu_llama, "start", start)
    monkeypatch.setattr(gpu, "KERNELS", [sys.executable, "-c", "print('copy: 4000 GB/s')"])
    return found


def test_what_was_measured_is_told_drawn_and_kept(tmp_path, asked, capsys):
    assert gpu.main(["--out", str(tmp_path), "--curve", "2"]) == 0, "nothing is missing"
    said = capsys.readouterr().out
    for text in ("ours:0-fused-fp8", "loss, means of 20", "copy: 4000 GB/s", "device ms", "marks of one H200"):
        assert text in said, f"{text!r} is not in what is told"
    names = {job.contender for job in gpu.plan(gpu.PARTS)} - {"kernels"}
    assert {name for name, *_ in asked} == names, "every contender of the plan runs"
    assert all(fresh for *_, fresh in asked), "first starts are those of a fresh machine"
    assert ("ours:0-fused", "8b", 0, True) in asked, "the large shape has no curve"
    assert {name for name, shape, curve, _ in asked if curve} == set(gpu.CURVES), "curves of the chosen ones only"
    assert [name for name, *_ in asked].count("plain") == 2, "it takes turns with ours"
    known = json.loads((tmp_path / "gpu.json").read_text())
    assert set(known) == {"runs", "kernels", "missing"}
    assert "8b ours:0-fused" in known["runs"]
    assert (tmp_path / "gpu.txt").read_text().strip() in said, "the file has what was printed"
    root = ElementTree.fromstring((tmp_path / "gpu.svg").read_text())
    assert "ours:0-fused-fp8" in [each.text for each in root.iter() if each.tag.endswith("text")]


def test_a_contender_that_fails_leaves_the_others_and_is_told(tmp_path, asked, monkeypatch, capsys):
    start = gpu.gpu_llama.start
    monkeypatch.setattr(
        gpu.gpu_llama, "start", lambda name, *_, **given: [None] if name == "ours:0" else start(name, *_, **given)
    )
    assert gpu.main(["--parts", "training", "--out", str(tmp_path)]) == 1
    assert "not here: ours:0: no result" in capsys.readouterr().out
    assert "ours:0-fused" in json.loads((tmp_path / "gpu.json").read_text())["runs"]


def test_times_survive_a_curve_that_is_cut(tmp_path, monkeypatch, capsys):
    cut = {**RUN, "problem": "no end within 3 s"}
    monkeypatch.setattr(gpu.gpu_llama, "start", lambda *_, **__: [dict(cut)])
    assert gpu.main(["--parts", "training", "--contenders", "plain", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "not here: plain: no end within 3 s" in said
    assert "200" in said.split("\n\n")[1], "the table has its 200 tokens/s"


def test_what_there_is_no_time_for_is_not_begun(tmp_path, asked, capsys):
    assert gpu.main(["--out", str(tmp_path), "--seconds", "5"]) == 1
    assert asked == []
    assert "not here: plain: not begun" in capsys.readouterr().out


def test_each_process_gets_what_is_left(asked, monkeypatch, tmp_path):
    limits = []
    monkeypatch.setattr(gpu, "run", lambda job, options, limit_s, report: limits.append((job, limit_s)))
    gpu.main(["--out", str(tmp_path), "--seconds", "50"])
    assert limits, "fifty seconds are enough to begin"
    assert all(limit <= min(50, job.limit_s) for job, limit in limits), f"{limits} are above 50 s"


def test_kernels_that_take_too_long_are_cut_and_their_lines_kept(monkeypatch):
    code = "import signal; print('first line', flush=True); signal.pause()"
    monkeypatch.setattr(gpu, "KERNELS", [sys.executable, "-c", code])
    said, problem = gpu.kernels(3.0)
    assert said == ["first line"]
    assert problem == "no end within 3 s"


def test_kernels_that_fail_say_so(monkeypatch):
    monkeypatch.setattr(gpu, "KERNELS", [sys.executable, "-c", "print('one'); raise SystemExit(7)"])
    assert gpu.kernels(60.0) == (["one"], "exit code 7")


def test_told_to_end_it_shows_what_is_there(tmp_path, asked, monkeypatch, capsys):
    start = gpu.gpu_llama.start

    def ended(name, *_, **given):
        if name == "ours:0-fused":
            os.kill(os.getpid(), signal.SIGTERM)
        return start(name, *_, **given)

    monkeypatch.setattr(gpu.gpu_llama, "start", ended)
    assert gpu.main(["--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "not here: the rest: told to end" in said
    assert "plain" in json.loads((tmp_path / "gpu.json").read_text())["runs"]


def test_a_part_that_nobody_knows_is_an_error(capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--parts", "speed"])
    assert "speed is none of training" in capsys.readouterr().err


def test_the_script_runs_from_anywhere(tmp_path):
    """Its own folder is on the path when it is a script; what lies beside it is found all the same."""
    done = subprocess.run(
        [sys.executable, gpu.__file__, "--help"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--seconds" in done.stdout


def test_of_several_runs_the_median_counts_and_the_most_memory():
    slow = {**RUN, "step_s": 1.5, "first_start_s": 0.3, "allocated_gib": 3.0, "losses": [2.0]}
    assert gpu_marks.typical({"plain": [RUN, slow]}) == {
        "plain": {**RUN, "step_s": 1.0, "first_start_s": pytest.approx(0.2), "allocated_gib": 3.0}
    }


def test_marks_are_judged_in_their_direction():
    fast = {**RUN, "tokens": 40_000, "allocated_gib": 34.0}
    told = gpu_marks.lines({"ours:0-fused": fast, "plain": RUN})
    rows = {line[:34].strip(): line for line in told}
    assert rows["fused kernels: tokens/s"].endswith("80,000  met")
    assert rows["fused kernels: peak GiB"].endswith("34.00  NOT MET")
    assert rows["fp8: tokens/s"].endswith("not measured")


def test_a_mark_of_losses_is_judged_by_means_of_twenty():
    base, noisy = [4.0] * 20 + [2.0] * 20, [3.9, 4.1] * 10 + [2.0] * 20
    told = gpu_marks.lines({"ours:0-fused": {**RUN, "curve": noisy}, "plain": {**RUN, "curve": base}})
    (line,) = [line for line in told if line.startswith("fused kernels: losses")]
    assert line.endswith("0.000  met")
    told = gpu_marks.lines({"ours:0-fused": {**RUN, "curve": base[:20] + [2.1] * 20}, "plain": {**RUN, "curve": base}})
    (line,) = [line for line in told if line.startswith("fused kernels: losses")]
    assert line.endswith("0.050  NOT MET")


def test_bars_are_as_long_as_their_numbers():
    root = ElementTree.fromstring(bars.draw(["a & b", "c"], [bars.Panel("x", [{"": 1.0}, {"": 2.0}])]))
    widths = [float(each.get("width")) for each in root.iter() if each.tag.endswith("rect")][1:]
    assert widths[0] * 2 == widths[1], f"{widths} are not as 1 to 2"


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_tst_128x256_64x4", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "attention"),
        ("void at::native::vectorized_elementwise_kernel<8, add>", "elementwise"),
        ("Memcpy DtoD (Device -> Device)", "copies and casts"),
        ("void at::native::elementwise_kernel<128, 4, {lambda(int)#1}>", "elementwise"),
        ("update_kernel", "optimizer"),
    ],
)
def test_kernels_are_sorted_by_their_names(kernel, kind):
    assert kind_of(kernel) == kind


def test_the_table_of_kinds_has_a_column_for_each_contender():
    text = lines({"plain": RUN["breakdown"], "ours:0": RUN["breakdown"]}, longest=1)
    assert "plain" in text[0]
    assert "ours:0" in text[0]
    assert text[-1].endswith("gemm")
