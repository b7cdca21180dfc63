"""Schedules of passes: what each needs and provides, and what is wrong with an order."""

import pytest

from deepspeed.compile.contracts import PassRegistry
from deepspeed.errors import DeepSpeedConfigError


def nothing(graph):
    """A pass of a script."""


@pytest.mark.parametrize(
    ("stage", "passes", "text"),
    [
        (3, ["prefetch", "zero3_compile"], "prefetch needs 'gathers', which zero3_compile provides after it; put"),
        (3, ["prefetch"], "prefetch needs 'gathers', which no pass before it provides"),
        (2, ["zero3_compile"], "zero3_compile needs 'stage 3', which is not the config's"),
        (2, ["zero2_compile", "zero2_compile"], "both provide 'reductions'"),
        (3, [nothing], "no pass that provides gathers and reductions; ZeRO stage 3 needs zero3_compile"),
        (1, ["zero1_compil"], "the pass 'zero1_compil' is unknown; use one of zero1_compile"),
    ],
)
def test_wrong_orders(stage, passes, text):
    with pytest.raises(DeepSpeedConfigError, match=text):
        PassRegistry().schedule([(0, passes)], stage)


def test_schedules():
    registry = PassRegistry()
    registry.register("mine", nothing, {"needs": ["gathers"]})
    schedule = registry.schedule([(0, ["zero3_compile", "mine"]), (5, ["zero3_compile", "prefetch", nothing])], 3)
    assert [schedule.begin(step) for step in (0, 4, 5, 9)] == [0, 0, 5, 5]
    with pytest.raises(DeepSpeedConfigError, match="begins with step 5"):
        registry.schedule([(5, ["zero3_compile"])], 3)
    with pytest.raises(DeepSpeedConfigError, match="registered already"):
        registry.register("mine", nothing)
