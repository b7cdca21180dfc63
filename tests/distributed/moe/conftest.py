"""Tests of Transformers' models fork ranks that have it loaded, which takes longer to import than most tests take."""

from __future__ import annotations

import pytest

from tests import harness
from tests.clients.server import SERVER


@pytest.fixture(autouse=True)
def _client_server(request, monkeypatch):
    if request.path.stem.startswith("test_auto"):
        monkeypatch.setattr(harness, "SERVER", SERVER)
