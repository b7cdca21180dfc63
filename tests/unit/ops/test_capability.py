"""Facts about the machine: composition, reasons, laziness, and that asking never raises."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.ops import capability
from deepspeed.ops.capability import Capability, ProbeResult, check_arch_list, compute_capability


def fact(holds: bool, reason: str = "", name: str = "fact") -> Capability:
    return Capability(name, lambda: ProbeResult(holds, reason))


@given(a=st.booleans(), b=st.booleans(), c=st.booleans())
def test_composition_is_boolean_algebra(a, b, c):
    x, y, z = fact(a), fact(b), fact(c)
    assert bool(x & y & z) is (x & (y & z)).holds is (a and b and c)


def test_and_names_every_missing_thing_once():
    needs = fact(False, "no triton") & fact(True, "fine") & (fact(False, "no gpu") & fact(False, "no triton"))
    assert needs.reason == "no triton; no gpu"


def test_asked_once_and_only_when_needed():
    calls = []

    def probe() -> ProbeResult:
        calls.append(1)
        return ProbeResult(True, "")

    lazy = Capability("lazy", probe)
    joined = lazy & lazy
    assert not calls
    assert joined.holds
    assert lazy.holds
    assert len(calls) == 1


@pytest.mark.parametrize(
    "error", [OSError("disk"), ImportError("x"), RuntimeError("driver"), ValueError("v"), KeyError("k")]
)
def test_a_failing_probe_means_no(error):
    def probe() -> ProbeResult:
        raise error

    broken = Capability("gizmo", probe)  # and is asked again later
    assert not broken.holds
    assert "gizmo could not be determined" in broken.reason
    assert type(error).__name__ in broken.reason


def test_a_fact_that_may_change_is_asked_again():
    answers = iter([False, True])
    changing = Capability("weather", lambda: ProbeResult(next(answers), "rain"), lasting=False)
    assert [changing.holds, changing.holds] == [False, True]


@pytest.mark.parametrize("name", [name for name in vars(capability) if name.startswith(("has_", "on_"))])
def test_every_fact_answers_with_a_reason(name):
    verdict = getattr(capability, name).verdict
    assert isinstance(verdict.holds, bool)
    assert verdict.reason
    assert "could not be determined" not in verdict.reason


def test_cuda_facts_without_cuda():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert not capability.on_cuda.holds
    assert "cpu" in capability.on_cuda.reason
    assert compute_capability(9).reason == capability.on_cuda.reason


def test_cxx_variable_that_is_no_program(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    assert capability.cxx_compiler() is None
    verdict = capability.has_cxx_compiler._probe()
    assert verdict == ProbeResult(False, "CXX=no-such-compiler -O2 is no program")


def test_cuda_home_comes_before_path(monkeypatch, tmp_path):
    for place in ("home/bin", "path"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "nvcc").write_text("#!/bin/sh\n")
        (tmp_path / place / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert capability.nvcc() == str(tmp_path / "home/bin/nvcc")
    monkeypatch.delenv("CUDA_HOME")
    assert capability.nvcc() == str(tmp_path / "path/nvcc")


@pytest.mark.parametrize(
    "text",
    ["9.0a", "8.0;9.0+PTX", "8.0 9.0a+PTX", "10.0f, 12.1", "7.5;7.5", "Hopper", "ampere;9.0", "", "native", " ; "],
)
def test_arch_lists(text):
    check_arch_list(text)


@pytest.mark.parametrize("text", ["9", "sm_90", "9.0aa", "8.0;nine", "9.0+SASS"])
def test_a_malformed_arch_is_named(text):
    with pytest.raises(ValueError, match=r"TORCH_CUDA_ARCH_LIST: .* is not a GPU architecture"):
        check_arch_list(text)
