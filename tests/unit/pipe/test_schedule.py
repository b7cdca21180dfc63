"""Schedules as data: complete, in order, without deadlock, with the bubble and the memory of the formulas."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import UsageError
from deepspeed.pipe.schedule.__main__ import main, summary, text
from deepspeed.pipe.schedule.actions import Action, PassKind, Schedule
from deepspeed.pipe.schedule.generators import SCHEDULES, folded, forward_only, looped, make
from deepspeed.pipe.schedule.simulate import Costs, simulate, validate

RANKS = st.integers(1, 6)
MICRO_BATCHES = st.integers(1, 17)
TIMES = st.integers(1, 5).map(float)


def test_a_rank_reads_as_text():
    assert make("1f1b", 2, 3).rank(0) == "F0 F1 B0 F2 B1 B2"
    assert make("1f1b", 2, 3).rank(1) == "F0 B0 F1 B1 F2 B2"
    assert make("gpipe", 2, 2).rank(0) == "F0 F1 B1 B0"
    assert make("zb-h1", 2, 2).rank(1) == "F0 I0 F1 I1 W0 W1"
    assert make("interleaved", 2, 2).rank(1) == "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"


@given(st.sampled_from(sorted(SCHEDULES)), RANKS, MICRO_BATCHES, st.integers(1, 3))
def test_every_schedule_is_valid_or_refused_with_numbers(name, ranks, micro_batches, chunks):
    if name == "dualpipev" and micro_batches < 2 * ranks:
        with pytest.raises(UsageError, match=rf"at least {2 * ranks} micro-batches; found {micro_batches}"):
            make(name, ranks, micro_batches)
        return
    schedule = make(name, ranks, micro_batches, chunks if SCHEDULES[name].chosen else None)
    assert validate(schedule) is schedule
    assert schedule.stages == ranks * schedule.chunks
    assert sorted(schedule.owners) == sorted(list(range(ranks)) * schedule.chunks)


@given(RANKS, MICRO_BATCHES, TIMES, TIMES, TIMES)
def test_gpipe_and_1f1b_have_the_same_bubble(ranks, micro_batches, forward, back, weight):
    costs = Costs(forward, back, weight)
    length = (micro_batches + ranks - 1) * (forward + back + weight)
    for name in ("gpipe", "1f1b"):
        timeline = simulate(make(name, ranks, micro_batches), costs)
        assert timeline.length == length
        assert timeline.bubble == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))
    assert simulate(make("gpipe", ranks, micro_batches)).peaks == (micro_batches,) * ranks
    assert simulate(make("1f1b", ranks, micro_batches)).peaks == tuple(
        min(ranks - rank, micro_batches) for rank in range(ranks)
    )


@given(RANKS, st.integers(1, 4), st.integers(1, 4), TIMES, TIMES)
def test_interleaving_divides_the_bubble(ranks, rounds, chunks, forward, back):
    micro_batches = rounds * ranks
    timeline = simulate(make("interleaved", ranks, micro_batches, chunks), Costs(forward, back, back))
    whole = forward + 2 * back
    assert timeline.length == pytest.approx((micro_batches + (ranks - 1) / chunks) * whole)
    assert timeline.bubble == pytest.approx((ranks - 1) / (chunks * micro_batches + ranks - 1))
    total = micro_batches * chunks
    held = [min(total, 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1) for rank in range(ranks)]
    assert timeline.peaks == tuple(held)


@given(RANKS, st.integers(0, 8))
def test_zero_bubble_waits_only_while_the_pipeline_fills(ranks, more):
    """Parts of equal length: ZB-H1 waits for p - 1 forwards, ZBV for p - 1 halves of one, and seldom for two more."""
    micro_batches = ranks + more
    h1 = simulate(make("zb-h1", ranks, micro_batches))
    assert h1.length == 3 * micro_batches + ranks - 1
    assert max(h1.peaks) == min(ranks, micro_batches)
    v = simulate(make("zbv", ranks, micro_batches))
    assert 0 <= v.length - (3 * micro_batches + (ranks - 1) / 2) <= (1 if ranks > 4 else 0)
    assert max(v.peaks) <= 2 * ranks


@given(RANKS, st.integers(0, 8))
def test_dual_pipe_v_has_the_length_of_zbv(ranks, more):
    micro_batches = 2 * ranks + more
    timeline = simulate(make("dualpipev", ranks, micro_batches))
    assert timeline.length == pytest.approx(3 * micro_batches + (ranks - 1) / 2)
    assert max(timeline.peaks) <= 2 * ranks + 1


@given(st.integers(2, 6), st.integers(0, 8))
def test_zero_bubble_is_shorter_than_1f1b(ranks, more):
    lengths = [simulate(make(name, ranks, 2 * ranks + more)).length for name in ("1f1b", "zb-h1", "zbv")]
    assert lengths[0] > lengths[1] > lengths[2]


@given(RANKS, MICRO_BATCHES, st.integers(1, 3))
def test_the_forward_alone(ranks, micro_batches, chunks):
    for owners in (tuple(range(ranks)), looped(ranks, chunks), folded(ranks)):
        schedule = validate(forward_only(ranks, micro_batches, owners))
        assert simulate(schedule).peaks == (0,) * ranks


@given(st.integers(1, 8), st.integers(0, 8))
def test_messages_of_zbv_have_time_to_arrive(ranks, more):
    """A rank has other work meanwhile: what they add to a step grows with the ranks, not with the micro-batches."""
    schedule = make("zbv", ranks, 2 * ranks - 1 + more)
    late = simulate(schedule, Costs(message=0.05)).length - simulate(schedule).length
    assert late / 0.05 == pytest.approx(max(5 * ranks - 7, 0)), "messages that are waited for"


def test_messages_take_time():
    assert simulate(make("1f1b", 2, 1), Costs(message=0.5)).length == 7.0


def spoiled(schedule: Schedule, rank: int, row: tuple[Action, ...], **changes) -> Schedule:
    rows = (*schedule.ranks[:rank], row, *schedule.ranks[rank + 1 :])
    values = {**vars(schedule), "ranks": rows, **changes}
    return Schedule(**values)


def test_the_validator_says_what_is_wrong():
    good = make("1f1b", 2, 3)
    row = good.ranks[0]
    with pytest.raises(UsageError, match=r"stage 0 has B of micro-batch 0; expected F and B, or F, I and W"):
        validate(spoiled(good, 0, row[1:]))
    with pytest.raises(UsageError, match=r"computes 0F0 more than once"):
        validate(spoiled(good, 0, (row[0], *row)))
    with pytest.raises(UsageError, match=r"1F0 is not rank 0's to compute"):
        validate(
            spoiled(good, 0, (*row, Action(PassKind.FORWARD, 1, 0)), ranks=((*row, Action(PassKind.FORWARD, 1, 0)), ()))
        )
    with pytest.raises(UsageError, match=r"activation number 0 from rank 0 to rank 1 is not the one"):
        validate(spoiled(good, 0, (row[1], row[0], *row[2:])))
    with pytest.raises(UsageError, match=r"cannot end: rank 0 before 0B0, rank 1 before 1F1 wait for each other"):
        validate(
            spoiled(
                good,
                0,
                tuple(Action(op, 0, mb) for op, mb in zip(map(PassKind, "FBFBFB"), (0, 0, 1, 1, 2, 2), strict=True)),
                ranks=(
                    tuple(
                        Action(op, 0, mb) for op, mb in zip(map(PassKind, "FBFBFB"), (0, 0, 1, 1, 2, 2), strict=True)
                    ),
                    tuple(
                        Action(op, 1, mb) for op, mb in zip(map(PassKind, "FFBBFB"), (0, 1, 0, 1, 2, 2), strict=True)
                    ),
                ),
            )
        )
    with pytest.raises(UsageError, match=r"rank 0 holds activations of 2 .* more than its limit of 1"):
        validate(spoiled(good, 0, row, limits=(1, 1)))


def test_names_that_do_not_exist_and_sizes_that_do_not_fit():
    with pytest.raises(UsageError, match="no schedule 'zb'; expected one of gpipe, 1f1b"):
        make("zb", 2, 2)
    with pytest.raises(UsageError, match="'zbv' puts 2 stages on each rank; found 3"):
        make("zbv", 2, 2, 3)
    with pytest.raises(UsageError, match="needs at least 1 micro-batches; found 0"):
        make("1f1b", 2, 0)
    with pytest.raises(UsageError, match="found 0 ranks"):
        make("1f1b", 0, 1)


def test_a_timeline_as_text():
    timeline = simulate(make("1f1b", 2, 2))
    assert text(timeline).splitlines() == [
        "rank 0  |F0 F1 .  .  B0 -  .  B1 -",
        "rank 1  |.  F0 B0 -  F1 B1 -  .  .",
    ]
    assert "bubble 33.3 %" in summary(timeline)


def test_the_program(capsys, tmp_path):
    assert main(["zbv", "--stages", "2", "--micro-batches", "3", "--instructions"]) == 0
    out = capsys.readouterr().out
    assert "rank 0: 0F0" in out
    assert "zbv: 2 ranks, 3 micro-batches" in out
    assert main(["dualpipev", "--stages", "4", "--micro-batches", "2"]) == 1
    assert "needs at least 8 micro-batches; found 2" in capsys.readouterr().err
    for words, error in (
        (["--forward", "nan"], "the time 'forward' is nan; expected a number of at least 0"),
        (["--message", "-1"], "the time 'message' is -1.0"),
        (["--weight", "inf"], "the time 'weight' is inf"),
        (["--forward", "0", "--input", "0", "--weight", "0"], "all take 0"),
        (["--stages", "0"], "found 0 ranks"),
        (["--micro-batches", "-2"], "found -2"),
        (["--chunks", "2"], "puts 1 stages on each rank; found 2"),
    ):
        assert main(["1f1b", *words]) == 1, words
        assert error in capsys.readouterr().err
    assert main(["interleaved", "--chunks", "0"]) == 1
    assert "with 0 stages each" in capsys.readouterr().err
    assert main(["1f1b", "--forward", "1e-9"]) == 0
    assert len(capsys.readouterr().out) < 100_000, "a line is of bounded length, however short a part is"
    pytest.importorskip("matplotlib")
    assert main(["1f1b", "--plot", str(tmp_path / "timeline.xyz")]) == 1
    assert "no picture can be drawn into" in capsys.readouterr().err
    assert main(["1f1b", "--forward", "1000000", "--plot", str(tmp_path / "long.png")]) == 0
    picture = tmp_path / "timeline.png"
    assert main(["1f1b", "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["1f1b", "--plot", str(tmp_path / "absent" / "x.png")]) == 1
