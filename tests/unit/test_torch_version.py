"""A torch that is too old is told when the library is imported, as the distribution's requirements have it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deepspeed._package import _OLDEST_TORCH as OLDEST
from deepspeed._package import require_torch as require

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("version", ["2.6.0+cu124", "2.8.1", "1.13.1", "2.8.0a0+git12ab"])
def test_too_old(version):
    with pytest.raises(ImportError, match=re.escape(f"needs torch 2.9 or later and found {version}")):
        require(version)


@pytest.mark.parametrize("version", ["2.9.0", "2.11.0+cu128", "2.13.0", "2.14.0.dev20261101", "3.0", "a build of mine"])
def test_new_enough(version):
    require(version)


def test_the_requirement_is_the_same():
    oldest = ".".join(map(str, OLDEST))
    assert f'"torch>={oldest}"' in (ROOT / "pyproject.toml").read_text()
    assert f"torch {oldest} or later" in (ROOT / "README.md").read_text()
