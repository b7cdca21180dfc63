"""The collector rests while torch is imported, and is then as it was."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from deepspeed._package import without_collection
from tests.harness import ROOT


@pytest.fixture
def collector():
    on = gc.isenabled()
    yield
    (gc.enable if on else gc.disable)()


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.usefixtures("collector")
def test_afterwards_it_is_as_it_was(on):
    (gc.enable if on else gc.disable)()
    with without_collection():
        assert not gc.isenabled()
    assert gc.isenabled() is on
    with pytest.raises(ValueError, match="inside"), without_collection():
        raise ValueError("inside")
    assert gc.isenabled() is on


def test_importing_the_package_leaves_it_on():
    code = "import deepspeed, gc, torch; print(gc.isenabled())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
