"""`ds_ssh` and `ds_report` over several hosts: what is asked, and what is told."""

from __future__ import annotations

import json
import subprocess

import pytest

from deepspeed.launcher import ds_ssh, report
from deepspeed.launcher.report import differences, shown_facts


def answer(torch="2.13", devices=2, chosen="triton", memory=2**34, warnings=()):
    return {
        "versions": {"torch": torch, "triton": None},
        "machine": {"memory": memory, "cores": 8, "vector_instructions": ["AVX2", "AVX512"]},
        "accelerator": {"name": "cuda", "devices": [{"index": n, "name": "H200"} for n in range(devices)]},
        "ops": [{"op": "adam", "implementation": chosen, "state": "chosen"}],
        "interfaces": [{"name": "eth0", "addresses": ["10.0.0.1"]}],
        "shared_memory": {"path": "/dev/shm", "total": 2**33, "free": memory},
        "warnings": list(warnings),
    }


def test_facts():
    facts = shown_facts(answer())
    assert facts["accelerator.devices"] == "2 × H200"
    assert facts["op adam"] == "triton"
    assert facts["machine.memory"] == "16 GiB"
    assert facts["machine.vector_instructions"] == "AVX2, AVX512"
    assert "shared_memory.free" not in facts
    assert not any(name.startswith(("ops", "interfaces")) for name in facts)


def test_differences():
    same = {"h1": answer(), "h2": answer(memory=2**34 + 4096)}
    assert differences(same) == {}
    found = differences({**same, "h3": answer(torch="2.11", devices=1), "h4": {}})
    assert found["versions.torch"] == {"2.13": ["h1", "h2"], "2.11": ["h3"], "-": ["h4"]}
    assert found["accelerator.devices"] == {"2 × H200": ["h1", "h2"], "1 × H200": ["h3"], "": ["h4"]}


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    (tmp_path / "hosts").write_text("h1 slots=1\nh2 slots=1\nh3 slots=1\n")
    replies = {}

    def run(command, **_):
        host = command[command.index("--") + 1]
        reply = replies[host]
        if isinstance(reply, Exception):
            raise reply
        return subprocess.CompletedProcess(command, *reply)

    monkeypatch.setattr(subprocess, "run", run)
    replies.update({host: (0, json.dumps(answer()), "") for host in ("h1", "h2", "h3")})
    return ["--hostfile", str(tmp_path / "hosts")], replies


def test_equal_hosts(hosts, capsys):
    words, _ = hosts
    assert report.main(words) == 0
    assert "3 hosts answered, and nothing differs between them" in capsys.readouterr().out


def test_hosts_that_differ_or_do_not_answer(hosts, capsys):
    words, replies = hosts
    replies["h1"] = (0, json.dumps(answer(torch="2.11", warnings=["\x1b[31mlittle memory"])), "")
    replies["h2"] = (255, "", "x\nPermission denied (publickey).\n")
    assert report.main(words) == 1
    out = capsys.readouterr().out
    assert "versions.torch" in out
    assert "h2: exit code 255: Permission denied (publickey)." in out
    assert "! h1: \\x1b[31mlittle memory" in out
    replies["h2"] = (0, "motd", "")
    replies["h3"] = subprocess.TimeoutExpired("ssh", 1)
    assert report.main([*words, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {"h1", "h2", "h3"}
    assert "which is no report" in told["h2"]["error"]
    assert "no answer within" in told["h3"]["error"]
    assert report.main([*words, "--include", "h1", "--json"]) == 0


def test_no_hostfile(capsys):
    assert report.main(["--hostfile", "/no/such"]) == 2
    assert "there is no hostfile /no/such" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        ds_ssh.main(["-f", "/no/such", "id"])
    assert ended.value.code == 2


def test_what_ds_ssh_runs(hosts, monkeypatch):
    words, _ = hosts
    plans = []
    monkeypatch.setattr(ds_ssh, "supervise", lambda plan, environment: plans.append(plan) or 0)
    ds_ssh.main([*words, "--exclude", "h2", "--ssh_port", "22", "--ssh_args=-i key", "ls", "-l", "$HOME"])
    (plan,) = plans
    assert [link.host for link in plan.links] == ["h1", "h3"]
    assert plan.links[0].command[:3] == ["ssh", "-i", "key"]
    assert plan.links[0].command[-5:] == ["-p", "22", "--", "h1", "ls -l $HOME"]
    assert (plan.independent, plan.style) == (True, "host")
    assert report.ask_hosts.__doc__
