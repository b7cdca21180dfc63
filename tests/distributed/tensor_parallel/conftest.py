"""Ranks of this folder are forked with Transformers loaded, which takes longer to import than most tests take."""

from __future__ import annotations

import pytest

from tests import harness
from tests.clients.server import SERVER


@pytest.fixture(autouse=True)
def _client_server(monkeypatch):
    monkeypatch.setattr(harness, "SERVER", SERVER)
