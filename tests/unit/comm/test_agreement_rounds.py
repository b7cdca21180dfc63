"""Agreements of thousands of ranks: every rank knows all numbers after a few rounds, simulated in one process."""

from __future__ import annotations

import numpy as np
import pytest

from deepspeed.comm.agreement import FEW, rounds, schedule

HOP = 30e-6
"""Seconds that a message takes from host to host."""
EXCHANGES = 5
"""Of one steady step at stage 3: begin and end of forward and backward, and the step."""


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 16, 17, 64, 100, 257])
def test_every_rank_knows_all_numbers(size):
    known = [[rank] for rank in range(size)]  # the numbers of ranks from itself on
    for messages in schedule(size):
        before = [list(numbers) for numbers in known]
        for rank in range(size):
            for distance, count in messages:
                assert len(known[rank]) == distance, "what comes next is appended"
                known[rank] += before[(rank + distance) % size][:count]
    assert all(known[rank] == [(rank + step) % size for step in range(size)] for rank in range(size))


@pytest.mark.parametrize(("size", "limit"), [(8, 1e-3), (64, 1e-3), (1024, 1e-3), (16384, 2e-3)])
def test_hosts_wait_little_for_a_step(size, limit):
    """Messages of a round go side by side; a rank goes on when those of its round have come."""
    clock = np.zeros(size)
    clock[::7] = 20e-6  # some come later than others
    start = clock.max()
    for _ in range(EXCHANGES):
        for messages in schedule(size):
            sent = clock + HOP
            for distance, _ in messages:
                clock = np.maximum(clock, np.roll(sent, -distance))
    if size > FEW:
        assert clock.max() - start == pytest.approx(EXCHANGES * rounds(size) * HOP)
    assert clock.max() - start <= limit


def test_the_rounds_grow_by_the_logarithm():
    assert [rounds(size) for size in (1, 2, 4, 5, 16, 1024, 16384)] == [0, 1, 2, 2, 2, 5, 7]
