"""Client libraries: a file is skipped where its library is missing, its ranks are forked with it loaded.

The library is the second word of the file's name: `test_accelerate_launch.py` needs `accelerate`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import harness
from tests.clients.server import CLIENTS, SERVER, missing

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items):
    absent = {client for client in CLIENTS if missing(client)}
    for item in items:
        client = item.path.stem.split("_")[1]
        if item.path.parent == FOLDER and client in absent:
            reason = f"{client} is not installed: pip install 'deepspeed[test]'"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _client_server(monkeypatch):
    monkeypatch.setattr(harness, "SERVER", SERVER)
