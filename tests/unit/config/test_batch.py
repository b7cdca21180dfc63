"""The batch triangle: every combination of given and missing values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.config.batch import resolve
from deepspeed.errors import BatchSizeError, DeepSpeedConfigError

small = st.integers(1, 64)


@given(small, small, small, st.lists(st.booleans(), min_size=3, max_size=3))
def test_whatever_is_missing_is_derived(micro, steps, ranks, keep):
    train = micro * steps * ranks
    given_train, given_micro, given_steps = (
        value if kept else None for value, kept in zip((train, micro, steps), keep, strict=True)
    )
    if given_train is None and given_micro is None:
        with pytest.raises(BatchSizeError, match="Either train_batch_size or train_micro_batch_size_per_gpu"):
            resolve(given_train, given_micro, given_steps, ranks)
        return
    batch = resolve(given_train, given_micro, given_steps, ranks)
    assert batch.train == batch.micro * batch.steps * ranks
    assert given_train in (None, batch.train)
    assert given_micro in (None, batch.micro)
    assert given_steps in (None, batch.steps)
    if sum(keep) >= 2:
        assert (batch.train, batch.micro, batch.steps) == (train, micro, steps)
    else:
        assert batch.steps == 1


@given(st.none() | st.integers(-3, 100), st.none() | st.integers(-3, 100), st.none() | st.integers(-3, 100), small)
def test_any_numbers_give_a_batch_or_a_batch_error(train, micro, steps, ranks):
    try:
        batch = resolve(train, micro, steps, ranks)
    except BatchSizeError as error:
        assert isinstance(error, AssertionError)
        assert isinstance(error, DeepSpeedConfigError)
    else:
        assert batch.train == batch.micro * batch.steps * ranks
        assert min(batch.train, batch.micro, batch.steps) >= 1


def test_the_error_shows_the_equation_with_the_numbers():
    with pytest.raises(BatchSizeError, match=r"32 != 4 \* 3 \* 2 = 24"):
        resolve(32, 4, 3, 2)
    with pytest.raises(BatchSizeError, match=r"33 is not divisible by .* 4 × 2 data-parallel ranks = 8.*32 or 40"):
        resolve(33, 4, None, 2)
    with pytest.raises(BatchSizeError, match="train_micro_batch_size_per_gpu is 0; it must be at least 1"):
        resolve(8, 0, None, 1)
    with pytest.raises(BatchSizeError, match="found only gradient_accumulation_steps = 4"):
        resolve(None, None, 4, 1)


def test_what_was_derived_is_known():
    assert resolve(None, 2, None, 4).derived == {"train_batch_size", "gradient_accumulation_steps"}
    assert resolve(16, 2, 2, 4).derived == set()
