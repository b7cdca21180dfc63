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
    rhythm = UpdateSchedule(section)
    beats = [rhythm.beat() for _ in range(steps)]
    assert [beat.defers for beat in beats] == [False] * min(warm_up, steps) + [True] * max(steps - warm_up, 0)
    applied = [beat for beat in beats if beat.share is not None]
    assert all(beat.share == 1 / every for beat in applied)
    assert len(applied) == max(steps - warm_up, 0) // every
    since = 0
    for beat in beats[warm_up:]:
        since += 1
        assert not (beat.parts and beat.share is None)
        assert beat.parts == (beat.share is not None and since >= every + more)
        since = 0 if beat.parts else since


@given(st.lists(st.booleans(), max_size=40))
def test_whoever_asks_gets_the_mean_of_all_steps_until_then(asked):
    rhythm, waiting = UpdateSchedule(ZenFlowConfig()), 0
    assert not rhythm.by_itself
    for each in asked:
        waiting += 1
        beat = rhythm.beat(asked=each)
        assert beat.share == (1 / waiting if each else None)
        waiting = 0 if each else waiting
        assert rhythm.waiting == waiting
        assert not beat.parts  # nobody said how long an epoch is


def test_epochs_become_steps_once_they_are_known():
    rhythm = UpdateSchedule(ZenFlowConfig(select_strategy="epoch", select_interval=2, update_interval=3))
    rhythm.know_epoch(3)
    assert [rhythm.beat().parts for _ in range(12)] == [at % 6 == 5 for at in range(12)]
    told = UpdateSchedule(ZenFlowConfig(update_interval=1, steps_per_epoch=2))
    told.know_epoch(9)  # the config has said it
    assert [told.beat().parts for _ in range(4)] == [False, True, False, True]
    with pytest.raises(DeepSpeedConfigError, match=r"update_interval: 4 steps are more than the 3 .* 3 steps\)"):
        UpdateSchedule(ZenFlowConfig(update_interval=4)).know_epoch(3)
