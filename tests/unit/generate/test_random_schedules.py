"""Random schedules: every token reads what it should, no block is lost or held twice, and all sequences end."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.unit.generate.simulated import Schedule


def run(seeds):
    """Run schedules; how often what makes them hard happened."""
    seen = Counter()
    for seed in seeds:
        schedule = Schedule(seed)
        try:
            stats = schedule.run()
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
        seen.update(schedule.device.moved)
        seen.update({name: getattr(stats, name) for name in ("preemptions", "prefix_hit_tokens", "accepted")})
    return seen


@pytest.mark.slow
def test_some_random_schedules():
    seen = run(range(300))
    assert all(seen[what] > 20 for what in ("to_host", "from_host", "preemptions", "accepted")), seen
    assert seen["prefix_hit_tokens"] > 500  # of first sequences: others share their prompt anyway


@pytest.mark.slow
@pytest.mark.parametrize("thousand", range(10))
def test_ten_thousand_random_schedules(thousand):
    run(range(thousand * 1000, thousand * 1000 + 1000))
