"""Network interfaces out of the kernel's files."""

from __future__ import annotations

import pytest

from deepspeed.launcher.facts import Interface, interfaces, suggested


@pytest.fixture
def kernel(tmp_path):
    """A machine with a loopback, a fast and a slow card, one that is down, and a container bridge."""
    cards = {
        "lo": ("0x9", "unknown", None),
        "eth0": ("0x1003", "up", "10000"),
        "ib0": ("0x1003", "up", "200000"),
        "eth1": ("0x1003", "down", "-1"),
        "eth2": ("0x1002", "unknown", None),
        "docker0": ("0x1003", "up", "400000"),
    }
    for name, (flags, state, speed) in cards.items():
        folder = tmp_path / "net" / name
        folder.mkdir(parents=True)
        (folder / "flags").write_text(flags + "\n")
        (folder / "operstate").write_text(state + "\n")
        if speed:
            (folder / "speed").write_text(speed + "\n")
    (tmp_path / "if_inet6").write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fe8000000000000000fc00fffe000001 04 40 20 80     ib0\n"
        "garbage\n"
    )
    v4 = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "ib0": "10.1.0.5", "eth1": "10.2.0.5", "docker0": "172.17.0.1"}
    return interfaces(cards, tmp_path / "net", tmp_path / "if_inet6", v4.get)


def test_states(kernel):
    assert {each.name: each.up for each in kernel} == {
        "lo": True,
        "eth0": True,
        "ib0": True,
        "eth1": False,
        "eth2": False,
        "docker0": True,
    }


def test_addresses_and_speed(kernel):
    found = {each.name: each for each in kernel}
    assert found["lo"] == Interface("lo", True, True, ("127.0.0.1", "::1"), None)
    assert found["ib0"] == Interface("ib0", True, False, ("10.1.0.5", "fe80::fc:ff:fe00:1"), 200_000)
    assert found["eth1"].speed_mbit is None
    assert found["eth2"].addresses == ()


def test_the_fastest_real_card_is_suggested(kernel):
    assert suggested(kernel) == "ib0"
    assert suggested(each for each in kernel if each.name in ("lo", "docker0", "eth1", "eth2")) is None
    assert suggested([]) is None


def test_a_system_that_tells_nothing(tmp_path):
    (only,) = interfaces(["en0"], tmp_path / "none", tmp_path / "none", lambda name: None)
    assert only == Interface("en0", None, False, (), None)


def test_this_machine_answers():
    assert all(isinstance(each, Interface) for each in interfaces())
