"""Which micro step ends with an optimizer step."""

from __future__ import annotations

from deepspeed.runtime.accumulation import Accumulation


def test_a_changed_batch_size_counts_from_the_last_step():
    """Each optimizer step uses as many micro batches as were asked for, whatever ran before it."""
    count = Accumulation(4)
    found = {}
    for steps in (4, 3, 5, 2, 3):
        count.steps = steps
        found[steps] = [(count.at_boundary, count.advance())[0] for _ in range(steps)]
    assert found == {steps: [False] * (steps - 1) + [True] for steps in found}
    count.steps = 4
    for _ in range(2):
        assert not count.at_boundary
        count.advance()
    count.steps = 2  # more micro batches ran than a step needs now
    assert count.at_boundary
    count.advance()
    assert not count.at_boundary
    assert count.position == 0
    count.micro_steps = 7  # a script's own count: the boundary is where it is a multiple
    assert count.at_boundary
    assert count.position == 1
