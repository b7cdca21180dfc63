"""Ranks of tests that use Transformers are forked with it loaded: a rank would load it for seconds."""

from __future__ import annotations

import pytest

from tests import harness
from tests.clients.server import SERVER


@pytest.fixture
def with_transformers(monkeypatch):
    monkeypatch.setattr(harness, "SERVER", SERVER)
