"""ds_report: every section, the flags, JSON, narrow and plain output, and machines that lack everything."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import subprocess
import sys
from collections import namedtuple

import pytest
from rich.console import Console

import deepspeed
from deepspeed.accelerator import reset_accelerator
from deepspeed.launcher import facts, report
from deepspeed.launcher.facts import (
    AcceleratorFacts,
    DeviceFacts,
    HostFacts,
    Interface,
    SharedMemory,
    SystemFeature,
    SystemReport,
    Tool,
)
from deepspeed.ops.registry import Explanation, State

SECTIONS = [
    "Versions",
    "Installed at",
    "Machine",
    "Accelerator",
    "Ops",
    "Build tools",
    "Launchers",
    "Network",
    "Environment",
    "Warnings",
]


@pytest.fixture
def sample():
    """A report with something of everything, long values included."""
    long = "/a/very/long/path/" + "x" * 150
    return SystemReport(
        versions={"deepspeed": "0.20.0", "triton": None},
        machine=HostFacts(
            "Linux", "x86_64 Xeon", 8, 2**34, ("AVX2",), (SystemFeature("libaio", False, "it is not installed"),)
        ),
        paths={"torch": long},
        accelerator=AcceleratorFacts(
            "cuda",
            "nccl",
            None,
            (DeviceFacts(0, "NVIDIA H200", 140 * 2**30, "9.0"),),
            (SystemFeature("cuda", True, ""), SystemFeature("xpu", False, "torch finds no XPU")),
        ),
        ops=(
            Explanation("adam", "triton", 20, State.FAILED, "RuntimeError: [bold]no[/bold]"),
            Explanation("adam", "cpu", 15, State.UNAVAILABLE, "no compiler"),
            Explanation("adam", "foreach", 10, State.CHOSEN, "the best that runs here"),
            Explanation("adam", "reference", 0, State.AVAILABLE, ""),
        ),
        build_tools=(Tool("nvcc", None, None),),
        shared_memory=SharedMemory("/dev/shm", 64 * 2**20, 2**20),
        interfaces=(Interface("eth0", True, False, ("10.0.0.5",), 10_000),),
        suggested_interface="eth0",
        launchers=(Tool("mpirun", "/usr/bin/mpirun", "Open MPI: mpirun (Open MPI) 4.1"),),
        environment={"NCCL_DEBUG": "INFO"},
        warnings=("/dev/shm holds only 64 MiB",),
    )


def text(sample, width=120):
    out = io.StringIO()
    report.render(sample, Console(file=out, width=width, color_system=None, markup=False))
    return out.getvalue()


def headings(output):
    return [line for line in output.splitlines() if line and not line.startswith(" ")]


def run(capsys, *argv):
    assert report.main(argv) == 0
    return capsys.readouterr().out


def test_the_text_tells_everything(sample):
    output = text(sample)
    assert headings(output) == SECTIONS
    for part in (
        *("0.20.0", "NVIDIA H200", "140.0 GiB", "9.0", "torch finds no XPU", "chosen", "not available", "no compiler"),
        *(
            "failed to load",
            "[bold]no[/bold]",
            "not found",
            "Open MPI",
            "10 Gb/s",
            "10.0.0.5",
            "no, it is not installed",
        ),
        *("NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0", "! /dev/shm holds only 64 MiB", "64 MiB, 1 MiB free"),
    ):
        assert part in output


@pytest.mark.parametrize("width", [40, 80, 160])
def test_no_line_is_wider_than_the_terminal_and_nothing_is_cut(sample, width):
    output = text(sample, width)
    assert max(len(line) for line in output.splitlines()) <= width
    squeezed = "".join(output.split())
    assert "x" * 150 in squeezed
    assert "…" not in output


def test_every_section_comes_from_this_machine(capsys):
    output = run(capsys)
    assert [each for each in headings(output) if each != "Warnings"] == SECTIONS[:-1]
    assert deepspeed.__version__ in output
    assert "global_norm" in output
    assert "\x1b" not in output
    assert not any(line.endswith(" ") for line in output.splitlines())


def test_json_holds_the_same_facts(capsys):
    found = json.loads(run(capsys, "--json"))
    assert set(found) == {field.name for field in dataclasses.fields(SystemReport)}
    assert found["versions"]["deepspeed"] == deepspeed.__version__
    assert found["accelerator"]["name"] in {each["name"] for each in found["accelerator"]["candidates"]}
    assert {"op", "implementation", "rank", "state", "reason"} == set(found["ops"][0])
    assert {line["state"] for line in found["ops"]} >= {"chosen", "available"}


def test_hiding_ops(capsys):
    assert "Ops" not in headings(run(capsys, "--hide_operator_status"))
    assert json.loads(run(capsys, "--json", "--hide_operator_status"))["ops"] == []


def test_hiding_complaints(capsys, sample, monkeypatch):
    monkeypatch.setattr(report, "gather", lambda: sample)
    output = run(capsys, "--hide_errors_and_warnings")
    assert headings(output) == SECTIONS[:-1]
    for part in ("torch finds no XPU", "no compiler", "RuntimeError", "it is not installed", "only 64 MiB"):
        assert part not in output
    assert "the best that runs here" in output


def test_a_bad_accelerator_name_is_reported_not_raised(capsys, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "gpuu")
    reset_accelerator()
    try:
        found = json.loads(run(capsys, "--json"))
    finally:
        monkeypatch.undo()
        reset_accelerator()
    assert found["accelerator"]["name"] is None
    assert "gpuu" in found["accelerator"]["problem"]
    (warning,) = [each for each in found["warnings"] if "gpuu" in each]
    assert "\n" not in warning


def test_a_machine_without_any_tool(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(facts.sys, "executable", "/nowhere/python")
    monkeypatch.setattr(facts.capability, "nvcc", lambda: None)
    monkeypatch.setattr(facts, "interfaces", lambda: ())
    output = run(capsys)
    assert output.count("not found") == len(facts.build_tools()) + len(facts.launchers())
    assert "no interface was found" in output


@pytest.mark.parametrize(("size", "warned"), [(511, True), (512, False)])
def test_small_shared_memory_is_warned_about(monkeypatch, size, warned):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(size * 2**20, 0, 2**20))
    found = facts.gather()
    assert found.shared_memory == SharedMemory("/dev/shm", size * 2**20, 2**20)
    assert any("/dev/shm holds only" in warning for warning in found.warnings) is warned


def test_no_shared_memory_at_all(tmp_path):
    assert facts.shared_memory(str(tmp_path / "none")) is None


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("mpirun (Open MPI) 4.1.4\n", "Open MPI"),
        ("mpirun (OpenRTE) 3.0\n", "Open MPI"),
        ("HYDRA build details:\n    Version: 4.2\n", "MPICH"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9\n", "Intel MPI"),
        ("MVAPICH 3.0 hydra\n", "MVAPICH"),
        ("something else", None),
    ],
)
def test_which_mpi(said, name):
    assert facts.mpi_name(said) == name


@pytest.mark.parametrize(("torch_cuda", "warned"), [("13.0", False), ("12.8", True), (None, False)])
def test_an_nvcc_of_another_cuda_is_warned_about(monkeypatch, torch_cuda, warned):
    monkeypatch.setattr(facts.torch.version, "cuda", torch_cuda)
    nvcc = Tool("nvcc", "/usr/bin/nvcc", "Cuda compilation tools, release 13.1, V13.1.1")
    assert bool(facts._build_warnings((nvcc,))) is warned


def test_a_tool_that_hangs_or_fails_has_no_version(monkeypatch):
    def slow(*args, **kwargs):
        raise subprocess.TimeoutExpired("x", 10)

    monkeypatch.setattr(subprocess, "run", slow)
    assert facts._output("x") == ""


@pytest.mark.slow
def test_as_a_module_in_a_c_locale_with_the_pipe_closed_early():
    command = f"{sys.executable} -m deepspeed.env_report | head -n 1"
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONIOENCODING": "ascii", "LC_ALL": "C", "DS_X": "\u00e9"},
    )
    assert done.stdout == "Versions\n"
    assert done.stderr == ""
