"""required_torch_version."""

from __future__ import annotations

import pytest
import torch

from deepspeed.accelerator.torch_version import required_torch_version


@pytest.mark.parametrize(
    ("installed", "low", "high", "expected"),
    [
        ("2.13.0+cpu", "2.6", None, True),
        ("2.13.0+cpu", "2.13.0", "2.13.0", True),
        ("2.13.0+cpu", "2.13.1", None, False),
        ("2.6.0a0+ecf3bae40a", 2.6, None, True),
        ("2.9.1", None, "2.9", False),
        ("2.9.0", None, 2.9, True),
        ("2.10.0", "2.9", None, True),
        ("2.10.0", "2.9", "2.9.9", False),
    ],
)
def test_required_torch_version(monkeypatch, installed, low, high, expected):
    monkeypatch.setattr(torch, "__version__", installed)
    assert required_torch_version(min_version=low, max_version=high) is expected


def test_a_question_needs_a_bound():
    with pytest.raises(ValueError, match="min_version"):
        required_torch_version()
    with pytest.raises(ValueError, match="'new' is not a version"):
        required_torch_version("new")
