"""Environment variables in the report: which, what is masked, what is warned about."""

from __future__ import annotations

import pytest

from deepspeed.launcher.environment import MASK, relevant
from deepspeed.launcher.facts import variable_warnings as warnings


def test_only_what_matters_sorted():
    environ = {
        "RANK": "0",
        "NCCL_DEBUG": "INFO",
        "HOME": "/root",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "DS_ACCELERATOR": "cpu",
    }
    assert list(relevant(environ).items()) == [
        ("CUDA_VISIBLE_DEVICES", "0,1"),
        ("DS_ACCELERATOR", "cpu"),
        ("NCCL_DEBUG", "INFO"),
        ("RANK", "0"),
    ]


def test_what_the_import_itself_sets_is_not_shown():
    assert relevant({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}) == {}


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("DS_API_KEY", "abc", MASK),
        ("NCCL_TOKEN", "abc", MASK),
        ("ds_secret".upper(), "abc", MASK),
        ("DS_PASSWORD", "abc", MASK),
        ("DS_PASS", "abc", MASK),
        ("TORCH_AUTH", "abc", MASK),
        ("DS_CREDENTIALS", "abc", MASK),
        ("DS_API_KEY", "", ""),
        ("DS_URL", "http://user:pw@host/x", f"http://user:{MASK}@host/x"),
        ("DS_EXTRA", "--hub hf_abcdefghijkl --n 2", f"--hub {MASK} --n 2"),
        ("NCCL_IB_PASSTHROUGH", "1", "1"),
        ("NCCL_SOCKET_IFNAME", "eth0", "eth0"),
        ("DS_X", "a\nb\x1b[31m", "a\\nb\\x1b[31m"),
    ],
)
def test_values(name, value, shown):
    assert relevant({name: value}) == {name: shown}


def test_a_name_that_is_not_text_can_still_be_printed():
    (value,) = relevant({"DS_X": b"\xff".decode("utf-8", "surrogateescape")}).values()
    value.encode("utf-8")


def test_nothing_to_warn_about():
    assert warnings({"TORCH_CUDA_ARCH_LIST": "8.0;9.0a+PTX", "DS_OP_SCALE": "reference", "DS_BUILD_OPS": "0"}) == []


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"TORCH_CUDA_ARCH_LIST": "nine"}, "TORCH_CUDA_ARCH_LIST: 'nine'"),
        ({"DS_BUILD_CPU_ADAM": "1"}, "DS_BUILD_CPU_ADAM has no effect"),
        ({"DS_OP_WARP": "fast"}, "DS_OP_WARP names no op"),
        ({"DS_OP_SCALE": "warp"}, "DS_OP_SCALE=warp: op 'scale' has no such implementation"),
    ],
)
def test_warnings(environ, expected):
    (warning,) = warnings(environ)
    assert warning.startswith(expected)
