"""Which accelerator is chosen, what is said when a wish cannot be met, and the slot that holds the choice."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import types
from importlib.metadata import EntryPoint

import pytest

import deepspeed.accelerator as package
from deepspeed.accelerator import detect as home
from deepspeed.accelerator.cpu import CPU_Accelerator
from deepspeed.accelerator.detect import BUILT_IN, _built_in, find_accelerator, known_names, survey
from deepspeed.errors import AcceleratorError, DeepSpeedError


class OtherAccelerator(CPU_Accelerator):
    """A third party's accelerator."""

    name = "other"


class AbsentAccelerator(OtherAccelerator):
    def is_available(self):
        return False


class FailingAccelerator(OtherAccelerator):
    def __init__(self):
        raise RuntimeError("driver 3 is older than 4")


class NoAccelerator:
    """What a mistaken entry point may name."""


@pytest.fixture
def machine(monkeypatch):
    """A machine on which only the CPU is found, with no third party; a function adds to it."""

    def build(*available, plugins=()):
        for name in BUILT_IN:
            reason = None if name in (*available, "cpu") else f"no {name} here"
            monkeypatch.setattr(_built_in(name), "why_unavailable", classmethod(lambda cls, reason=reason: reason))
        points = [EntryPoint(name, f"third_party:{what}", home.ENTRY_POINTS) for name, what in plugins]
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: points)

    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    module = types.ModuleType("third_party")
    for what in (OtherAccelerator, AbsentAccelerator, FailingAccelerator, NoAccelerator):
        setattr(module, what.__name__, what)
    monkeypatch.setitem(sys.modules, "third_party", module)
    package.reset_accelerator()
    build()
    yield build
    package.reset_accelerator()


def test_the_order_of_detection(machine):
    assert tuple(BUILT_IN) == ("xpu", "npu", "sdaa", "mps", "hpu", "mlu", "cuda", "cpu")
    names = list(BUILT_IN)
    for first in range(len(names)):
        machine(*names[first:])
        assert find_accelerator()._name == names[first]


def test_nothing_but_the_cpu(machine):
    assert isinstance(find_accelerator(), CPU_Accelerator)


@pytest.mark.parametrize("value", ["cuda", " CUDA "])
def test_a_name_wins_over_detection(machine, monkeypatch, value):
    machine("xpu", "cuda")
    monkeypatch.setenv("DS_ACCELERATOR", value)
    assert find_accelerator()._name == "cuda"


def test_an_empty_variable_is_no_wish(machine, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "")
    assert find_accelerator()._name == "cpu"


def test_an_unknown_name(machine, monkeypatch):
    machine("cuda")
    monkeypatch.setenv("DS_ACCELERATOR", "cude")
    with pytest.raises(AcceleratorError) as caught:
        find_accelerator()
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, DeepSpeedError)
    text = str(caught.value)
    assert "DS_ACCELERATOR='cude' is not a known accelerator; did you mean 'cuda'?" in text
    assert "found: cuda, cpu" in text
    assert "not found: npu: no npu here" in text
    assert "not found: supa: no class built in" in text
    assert "Known names: xpu, npu, sdaa, mps, hpu, mlu, cuda, cpu, supa, klxpu." in text


def test_a_name_like_no_other_has_no_suggestion(machine, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "zzzzzz")
    with pytest.raises(ValueError, match="is not a known accelerator\n"):
        find_accelerator()


@pytest.mark.parametrize("name", ["npu", "klxpu"])
def test_an_unavailable_name(machine, monkeypatch, name):
    monkeypatch.setenv("DS_ACCELERATOR", name)
    with pytest.raises(ValueError, match=rf"DS_ACCELERATOR='{name}' cannot be used on this machine[\s\S]*{name}: no "):
        find_accelerator()


def test_the_real_reasons_on_this_machine(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: [])
    findings = {finding.name: finding for finding in survey()}
    assert list(findings) == [*BUILT_IN, "supa", "klxpu"]
    assert findings["cpu"].available
    assert findings["npu"].reason == "package torch_npu is not installed"
    for finding in findings.values():
        assert finding.available == (finding.reason is None)


def test_a_third_party_is_used_when_only_the_cpu_is_left(machine):
    plugins = [("other", "OtherAccelerator")]
    machine(plugins=plugins)
    assert type(find_accelerator()).__name__ == "OtherAccelerator"
    machine("cuda", plugins=plugins)
    assert find_accelerator()._name == "cuda"


def test_third_parties_are_not_looked_up_when_a_device_was_found(machine, monkeypatch):
    machine("cuda")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: pytest.fail("looked up"))
    assert find_accelerator()._name == "cuda"
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert find_accelerator()._name == "cpu"


def test_a_third_party_by_name(machine, monkeypatch):
    machine("cuda", plugins=[("broken", "NoSuchName"), ("supa", "OtherAccelerator")])
    monkeypatch.setenv("DS_ACCELERATOR", "supa")
    assert type(find_accelerator()).__name__ == "OtherAccelerator"


def test_a_third_party_may_stand_in_for_a_built_in_that_is_not_there(machine, monkeypatch):
    machine(plugins=[("npu", "OtherAccelerator")])
    monkeypatch.setenv("DS_ACCELERATOR", "npu")
    assert type(find_accelerator()).__name__ == "OtherAccelerator"
    machine("npu", plugins=[("npu", "OtherAccelerator")])
    assert type(find_accelerator()).__name__ == "NPU_Accelerator"


BROKEN = [
    ("NoSuchName", "AttributeError"),
    ("FailingAccelerator", "RuntimeError: driver 3 is older than 4"),
    ("NoAccelerator", "it gave a NoAccelerator, not a DeepSpeedAccelerator"),
    ("AbsentAccelerator", "finds no usable device"),
]


@pytest.mark.parametrize(("what", "reason"), BROKEN)
def test_a_broken_third_party_is_told_and_passed_over(machine, monkeypatch, what, reason):
    told = []
    monkeypatch.setattr(home.logger, "warning", lambda text, *args: told.append(text % args))
    machine(plugins=[("abroken", what), ("other", "OtherAccelerator")])
    assert type(find_accelerator()).__name__ == "OtherAccelerator"
    assert len(told) == 1
    assert told[0].startswith("accelerator abroken is not used: ")
    assert reason in told[0]


@pytest.mark.parametrize(("what", "reason"), BROKEN)
def test_a_broken_third_party_asked_for_by_name_is_an_error(machine, monkeypatch, what, reason):
    machine(plugins=[("abroken", what)])
    monkeypatch.setenv("DS_ACCELERATOR", "abroken")
    with pytest.raises(ValueError, match="DS_ACCELERATOR='abroken' cannot be used") as caught:
        find_accelerator()
    assert reason in str(caught.value)


def test_known_names_loads_no_third_party(machine):
    machine(plugins=[("abroken", "NoSuchName"), ("cpu", "NoSuchName")])
    assert known_names() == (*BUILT_IN, "supa", "klxpu", "abroken")


def test_the_slot_detects_once_and_can_be_set_and_reset(machine, monkeypatch):
    first = package.get_accelerator()
    assert first is package.get_accelerator()
    assert package.is_current_accelerator_supported()
    monkeypatch.setenv("DS_ACCELERATOR", "nosuch")
    assert package.get_accelerator() is first
    mine = OtherAccelerator()
    package.set_accelerator(mine)
    assert package.get_accelerator() is mine
    assert not package.is_current_accelerator_supported()
    machine(plugins=[("other", "OtherAccelerator")])
    assert package.is_current_accelerator_supported()
    package.reset_accelerator()
    with pytest.raises(ValueError, match="nosuch"):
        package.get_accelerator()
    monkeypatch.delenv("DS_ACCELERATOR")
    machine()
    assert package.get_accelerator() is not first


def test_only_an_accelerator_can_be_set(machine):
    for wrong in (None, "cuda", OtherAccelerator):
        with pytest.raises(AcceleratorError, match="set_accelerator got a"):
            package.set_accelerator(wrong)


@pytest.mark.slow
def test_import_and_first_use_touch_no_device_and_load_little():
    code = """
import json, os, sys, torch
before = set(sys.modules)
import deepspeed.accelerator
imported = sorted(m for m in set(sys.modules) - before if not m.startswith("deepspeed"))
name = deepspeed.accelerator.get_accelerator().device_name()
deepspeed.accelerator.get_accelerator().device_count()
print(json.dumps({"imported": imported, "cuda": torch.cuda.is_initialized(), "name": name,
    "check": os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"],
    "heavy": sorted({"numpy", "pydantic", "rich", "hjson", "torch._dynamo"} & (set(sys.modules) - before))}))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    facts = json.loads(result.stdout)
    assert not facts["cuda"]
    assert facts["check"] == "1"
    assert facts["heavy"] == []
    assert [m for m in facts["imported"] if m.split(".")[0] in ("torch", "importlib_metadata")] == []
