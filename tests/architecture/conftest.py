"""The parsed sources go with the tests that need them."""

from __future__ import annotations

import pytest

from tests.architecture.source import tree


@pytest.fixture(scope="package", autouse=True)
def _trees_are_dropped():
    """A million objects, which every later collection of this process would look through."""
    yield
    tree.cache_clear()
