"""Tests of several hosts skip where they cannot run, and fail where they must."""

from __future__ import annotations

import os

import pytest

from tests import hosts


@pytest.mark.parametrize(
    ("user", "missing", "reason"),
    [(1000, (), "need root"), (0, ("pdsh", "sshd"), "not installed: sshd, pdsh")],
)
def test_what_is_missing_is_named(monkeypatch, user, missing, reason):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(hosts, "which", lambda name: None if name in missing else f"/bin/{name}")
    monkeypatch.delenv(hosts.REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match=reason):
        hosts.need("pdsh")
    monkeypatch.setenv(hosts.REQUIRED, "required")
    with pytest.raises(pytest.fail.Exception, match=reason):
        hosts.need("pdsh")
