"""Bandwidth formulas, sizes in words, trimmed means."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.comm.operations import OPERATIONS
from deepspeed.comm.summary import bandwidth, calc_bw_log, convert_size, trimmed_mean

MB = 10**6


@pytest.mark.parametrize(
    ("op", "algorithm", "bus"),
    [  # 1 MB in 1 ms among 4 ranks is 8 Gbit/s
        ("all_reduce", 16.0, 12.0),
        ("inference_all_reduce", 16.0, 12.0),
        ("all_reduce_coalesced", 16.0, 12.0),
        ("all_gather", 32.0, 24.0),
        ("all_gather_into_tensor", 32.0, 24.0),
        ("reduce_scatter", 32.0, 24.0),
        ("reduce_scatter_tensor", 32.0, 24.0),
        ("all_to_all", 8.0, 6.0),
        ("all_to_all_single", 8.0, 6.0),
        ("send", 8.0, 8.0),
        ("irecv", 8.0, 8.0),
        ("broadcast", 8.0, 8.0),
        ("reduce", 8.0, 8.0),
        ("gather", 8.0, 8.0),
        ("scatter", 8.0, 8.0),
        ("barrier", 8.0, 8.0),
        ("all_gather_object", 8.0, 8.0),
        ("monitored_barrier", 8.0, 8.0),
        ("an operation of one's own", 8.0, 8.0),
    ],
)
def test_formulas(op, algorithm, bus):
    assert bandwidth(op, MB, 1.0, 4) == pytest.approx((algorithm, bus))


@given(
    st.sampled_from(sorted(OPERATIONS)),
    st.integers(0, 2**50),
    st.just(0.0) | st.floats(1e-6, 1e9),
    st.integers(1, 10**5),
)
def test_every_operation_has_numbers(op, size, duration, ranks):
    algorithm, bus = bandwidth(op, size, duration, ranks)
    assert 0 <= bus <= algorithm or (algorithm, bus) == (0, 0)


def test_calc_bw_log_is_among_the_world():
    assert calc_bw_log("all_reduce", MB, 1.0) == pytest.approx((16.0, 0.0))


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0B"),
        (1, "1.0 B"),
        (1023, "1023.0 B"),
        (1024, "1.0 KB"),
        (1536, "1.5 KB"),
        (1024**2, "1.0 MB"),
        (5 * 1024**3 + 1024**2 * 256, "5.25 GB"),
        (1024**8 * 3, "3.0 YB"),
        (1024**9, "1024.0 YB"),
    ],
)
def test_sizes(size, text):
    assert convert_size(size) == text


def test_trimmed_mean():
    assert trimmed_mean([]) == 0
    assert trimmed_mean([3.0]) == 3
    assert trimmed_mean([1.0] * 8 + [0.0, 1000.0]) == 1


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_trimmed_mean_is_between(values):
    assert min(values) - 1e-6 <= trimmed_mean(values) <= max(values) + 1e-6
