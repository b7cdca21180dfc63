"""When ZenFlow applies what it deferred, and when it chooses columns anew."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.config.zero import ZenFlowConfig
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.zero.states.zenflow import UpdateSchedule


@given(st.integers(0, 5), st.integers(1, 6), st.integers(0, 10), st.integers(1, 60))
def test_every_step_is_applied_once(warm_up, every, more, steps):
    section = ZenFlowConfig(
        full_warm_up_rounds=warm_up, update_interval=every, select_strategy="step", select_interval=every + more
    )
    schedule = UpdateSchedule(section)
    decisions = [schedule.decide() for _ in range(steps)]
    defers = [False] * min(warm_up, steps) + [True] * max(steps - warm_up, 0)
    assert [decision.defers for decision in decisions] == defers
    applied = [decision for decision in decisions if decision.share is not None]
    assert all(decision.share == 1 / every for decision in applied)
    assert len(applied) == max(steps - warm_up, 0) // every
    since = 0
    for decision in decisions[warm_up:]:
        since += 1
        assert not (decision.parts and decision.share is None)
        assert decision.parts == (decision.share is not None and since >= every + more)
        since = 0 if decision.parts else since


@given(st.lists(st.booleans(), max_size=40))
def test_whoever_asks_gets_the_mean_of_all_steps_until_then(asked):
    schedule, waiting = UpdateSchedule(ZenFlowConfig()), 0
    assert not schedule.by_itself
    for each in asked:
        waiting += 1
        decision = schedule.decide(asked=each)
        assert decision.share == (1 / waiting if each else None)
        waiting = 0 if each else waiting
        assert schedule.waiting == waiting
        assert not decision.parts  # nobody said how long an epoch is


def test_epochs_become_steps_once_they_are_known():
    schedule = UpdateSchedule(ZenFlowConfig(select_strategy="epoch", select_interval=2, update_interval=3))
    schedule.know_epoch(3)
    assert [schedule.decide().parts for _ in range(12)] == [at % 6 == 5 for at in range(12)]
    known = UpdateSchedule(ZenFlowConfig(update_interval=1, steps_per_epoch=2))
    known.know_epoch(9)  # the config has said it
    assert [known.decide().parts for _ in range(4)] == [False, True, False, True]
    with pytest.raises(DeepSpeedConfigError, match=r"update_interval: 4 steps are more than the 3 .* 3 steps\)"):
        UpdateSchedule(ZenFlowConfig(update_interval=4)).know_epoch(3)
