"""Which variables go to other hosts, and what `.deepspeed_env` says."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import DeepSpeedError
from deepspeed.launcher.environment import exported, looks_secret, parse_environment_file


def test_names_decide(tmp_path):
    environ = {
        "MLFLOW_X": "1",
        "PYTHONHASHSEED": "0",
        "UCX_NET_DEVICES": "mlx5_0",
        "NCCL_DEBUG": "INFO",
        "GLOO_SOCKET_IFNAME": "eth0",
        "DS_ACCELERATOR": "cpu",
        "HOME": "/root",
        "BASH_FUNC_PYTHON%%": "() { :; }",
        "PYTHON BAD": "x",
    }
    found = exported(environ, ["NCCL"], [tmp_path])
    assert set(found) == {*list(environ)[:6], "PYTHONPATH"}
    assert found["PYTHONPATH"] == os.getcwd()
    assert "NCCL_DEBUG" not in exported(environ, [], [])
    assert exported({"PYTHONPATH": "/a:/b"}, [], [])["PYTHONPATH"] == f"{os.getcwd()}:/a:/b"


def test_some_clouds_choose_their_own_network_devices():
    environ = {"AISC_JOB_NAME": "j", "NCCL_IB_HCA": "x", "UCX_NET_DEVICES": "y", "UCX_TLS": "tcp"}
    assert set(exported(environ, ["NCCL"], [])) == {"UCX_TLS", "PYTHONPATH"}


def test_the_file_of_the_working_folder_wins(tmp_path):
    home, here = tmp_path / "home", tmp_path / "here"
    for folder, text in ((home, "A=1\nB=1\nPYTHONPATH=/x\n"), (here, "\n# no variable\nB=2\n")):
        folder.mkdir()
        (folder / "vars").write_text(text)
    found = exported({}, [], [home, here, tmp_path / "none"], "vars")
    assert found == {"A": "1", "B": "2", "PYTHONPATH": "/x"}


@pytest.mark.parametrize(
    "value",
    ["a b  c", "\"q\" 'q'", "`id` $(id) $HOME", "a=b;c,d", "", "# no comment", "\\n \\\\", "%h", "é", "!x *"],
)
def test_values_are_what_is_written(value):
    assert parse_environment_file(f"KEY = {value} \r\n") == {"KEY": value}


@pytest.mark.parametrize("line", ["no sign", "=value", "A B=1", "A;id=1", "$(id)=1", "1A=2", "A\0=1", "A=b\0c", "é=1"])
def test_lines_that_are_no_variables(line):
    with pytest.raises(ValueError, match="vars, line 2"):
        parse_environment_file(f"OK=1\n{line}\n", "vars")


def test_a_secret_is_not_told_by_the_error():
    with pytest.raises(ValueError) as told:
        parse_environment_file("export HF_TOKEN=hf_abcdefghijkl")
    assert "hf_abc" not in str(told.value)


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text):
    try:
        found = parse_environment_file(text)
    except DeepSpeedError:
        return
    assert all(key.isidentifier() and "\n" not in value and "\0" not in value for key, value in found.items())


def test_a_file_that_cannot_be_read(tmp_path):
    (tmp_path / "vars").write_bytes(b"A=\xff\xfe")
    with pytest.raises(ValueError, match="cannot be read"):
        exported({}, [], [tmp_path], "vars")


def test_what_looks_secret():
    assert looks_secret("HF_TOKEN", "x")
    assert looks_secret("URL", "https://user:pw@host/")
    assert not looks_secret("NCCL_DEBUG", "INFO")
