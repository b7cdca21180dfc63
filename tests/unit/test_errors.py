"""The exception tree: each error is also the builtin that scripts catch today."""

from __future__ import annotations

import pytest

from deepspeed import errors


@pytest.mark.parametrize(
    ("kind", "builtins"),
    [
        (errors.DeepSpeedConfigError, (ValueError,)),
        (errors.BatchSizeError, (ValueError, AssertionError)),
        (errors.FeatureUnavailable, (ValueError,)),
        (errors.AcceleratorError, (RuntimeError,)),
        (errors.CommError, (RuntimeError,)),
        (errors.RendezvousError, (RuntimeError,)),
        (errors.LayoutError, (ValueError, AssertionError)),
        (errors.OpUnavailable, (RuntimeError,)),
        (errors.UsageError, (ValueError, AssertionError)),
    ],
)
def test_every_error_is_ours_and_the_builtin(kind, builtins):
    assert issubclass(kind, errors.DeepSpeedError)
    for builtin in builtins:
        assert issubclass(kind, builtin)


def test_the_tree_at_the_top_of_the_file_names_every_class():
    for name in errors.__all__:
        assert name in (errors.__doc__ or "")


def test_a_config_error_carries_its_path():
    assert errors.DeepSpeedConfigError("bad", path="zero_optimization.stage").path == "zero_optimization.stage"
