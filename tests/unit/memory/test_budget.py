"""The plan of tiers: never over a budget, everything once, more memory never slower; and how it is shown."""

from __future__ import annotations

import io
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.config.memory import MemoryConfig
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.memory.budget import Budget, StatePart, StateUnit, budgets_of, place, plan_lines, show

TIERS = ("device", "host", "disk")
KINDS = ("parameters", "masters", "moments", "gradients")

parts = st.builds(
    StatePart,
    st.sampled_from(KINDS),
    st.integers(0, 1000),
    st.sampled_from((1, 2, 4, 8, 1.0625)),
    fastest=st.sampled_from(TIERS[:2]),
    slowest=st.sampled_from(TIERS[1:]),
)
unit_lists = st.lists(st.lists(parts, max_size=3), max_size=12).map(
    lambda found: [StateUnit(f"tile {at}", tuple(some)) for at, some in enumerate(found)]
)
limits = st.none() | st.integers(0, 20_000)


@st.composite
def budget_lists(draw):
    return [Budget(tier, draw(limits), draw(st.integers(0, 500))) for tier in TIERS[: draw(st.integers(1, 3))]]


def unit(name, *nbytes):
    return StateUnit(name, tuple(StatePart(kind, size, 1) for kind, size in zip(KINDS, nbytes, strict=False)))


def tried(units, budgets):
    try:
        return place(units, budgets)
    except DeepSpeedConfigError:
        return None


@given(unit_lists, budget_lists())
def test_a_plan_keeps_to_its_budgets(units, budgets):
    plan = tried(units, budgets)
    if plan is None:
        stays = sum(part.nbytes for unit in units for part in unit.parts if part.slowest == "host")
        if any(each.limit is not None and each.window + stays > each.limit for each in budgets[:-1]):
            return
        # Then there is too little: the budgets, less what is kept back and what no unit fits into, are below the sum.
        slack = sum(budget.window for budget in budgets) + len(budgets) * max(unit.nbytes for unit in units)
        assert None not in [budget.limit for budget in budgets]
        assert sum(budget.limit for budget in budgets) < sum(unit.nbytes for unit in units) + slack
        return
    held = Counter()
    for each, tier in zip(units, plan.tiers, strict=True):
        for part in each.parts:
            held[part.lies_in(tier)] += part.nbytes
    assert plan.used == {budget.tier: held[budget.tier] for budget in budgets}
    for at, budget in enumerate(budgets):
        spills = any(slower.tier in plan.tiers for slower in budgets[at + 1 :])
        assert budget.limit is None or held[budget.tier] + spills * budget.window <= budget.limit


@given(unit_lists, budget_lists())
def test_every_unit_has_one_place_and_tiers_hold_runs_of_the_order(units, budgets):
    plan = tried(units, budgets)
    if plan is not None:
        assert plan.units == tuple(units)
        places = [TIERS.index(tier) for tier in plan.tiers]
        assert len(places) == len(units)
        assert places == sorted(places)
        elements, nbytes = Counter(), Counter()
        for row in plan.rows:
            elements[row.kind] += row.elements
            nbytes[row.kind] += row.nbytes
        for kind in KINDS:
            placed = [(p, p.lies_in(at)) for u, at in zip(units, plan.tiers, strict=True) for p in u.parts]
            there = [part for part, tier in placed if tier is not None and part.kind == kind]
            assert elements[kind] == sum(part.elements for part in there)
            assert nbytes[kind] == sum(part.nbytes for part in there)
            assert sum(plan.elements(kind).values()) == sum(p.elements for p, _ in placed if p.kind == kind)


@given(unit_lists, budget_lists(), st.integers(0, 2), st.integers(0, 5000))
def test_with_more_of_a_budget_nothing_becomes_slower(units, budgets, which, more):
    which = min(which, len(budgets) - 1)
    old = budgets[which]
    larger = list(budgets)
    larger[which] = Budget(old.tier, None if old.limit is None else old.limit + more, old.window)
    before, after = tried(units, budgets), tried(units, larger)
    if before is not None:
        assert after is not None
        assert all(TIERS.index(new) <= TIERS.index(was) for new, was in zip(after.tiers, before.tiers, strict=True))


@given(unit_lists, st.integers(0, 20_000))
def test_what_is_told_to_be_missing_is_enough(units, limit):
    sizes = [each.takes("host", "host") for each in units]
    plan = tried(units, [Budget("host", limit)])
    assert (plan is None) == (sum(sizes) > limit)
    if plan is None:
        left, room = list(sizes), limit
        while left[0] <= room:
            room -= left.pop(0)
        assert place(units, [Budget("host", limit + sum(left))])


def test_the_fastest_tier_is_filled_first():
    units = [unit("a", 10), unit("b", 10), unit("c", 10), unit("d", 10)]
    assert place(units, [Budget("device", 25), Budget("host", None)]).tiers == ("device", "device", "host", "host")
    assert place(units, [Budget("device", None)]).tiers == ("device",) * 4
    assert place(units, [Budget("device", 0), Budget("host", 40)]).tiers == ("host",) * 4
    assert place([], [Budget("device", 0)]).tiers == ()


def test_a_window_is_kept_back_only_where_something_is_beyond():
    units = [unit("a", 10), unit("b", 10)]
    kept = [Budget("host", 20, window=8), Budget("disk", 100)]
    assert place(units, kept).tiers == ("host", "host")
    plan = place([*units, unit("c", 10)], kept)
    assert plan.tiers == ("host", "disk", "disk")
    assert [(row.tier, row.kind, row.nbytes) for row in plan.rows][:2] == [
        ("host", "parameters", 10),
        ("host", "on the way", 8),
    ]
    with pytest.raises(DeepSpeedConfigError, match=r"memory.host: a rank may use 5 B of it, but needs 8 B") as caught:
        place(units, [Budget("host", 5, window=8), Budget("disk", 100)])
    assert caught.value.path == "memory.host"


def test_the_error_names_budgets_needs_and_what_is_missing():
    units = [unit("tile 0", 2000, 4000), unit("tile 1", 2000, 4000)]
    with pytest.raises(DeepSpeedConfigError) as caught:
        place(units, [Budget("device", 6000), Budget("host", 5000)])
    assert str(caught.value) == (
        "memory: a rank holds 12.00 KB of states (4.00 KB of parameters, 8.00 KB of masters) and may use device "
        "6.00 KB, host 5.00 KB: 6.00 KB find no place, from 'tile 1' (6.00 KB) on. Raise memory.host by as much for "
        "each rank of a machine, give memory.disk and memory.path, or train on more ranks."
    )
    assert caught.value.path == "memory"
    with pytest.raises(
        DeepSpeedConfigError, match=r"Raise memory.disk by as much for each rank of a machine, or train"
    ):
        place(units, [Budget("disk", 1)])
    with pytest.raises(DeepSpeedConfigError, match="may use nothing"):
        place(units, [])


def test_budgets_of_the_config():
    section = MemoryConfig(device="70GB", host="200GB", disk="1TB", path="/fast")
    assert budgets_of(section, ranks=8, windows={"host": 5}) == (
        Budget("device", 70 * 10**9),
        Budget("host", 25 * 10**9, 5),
        Budget("disk", 125 * 10**9),
    )
    assert budgets_of(MemoryConfig()) == (Budget("device", None), Budget("host", None))
    assert budgets_of(MemoryConfig(device=0, host=7), ranks=2) == (Budget("device", 0), Budget("host", 3))
    with pytest.raises(UsageError, match="ranks is 0"):
        budgets_of(section, ranks=0)


@pytest.mark.parametrize(("elements", "width"), [(-1, 4), (1, -4), (1, float("inf")), (1, float("nan"))])
def test_a_part_has_a_size(elements, width):
    with pytest.raises(UsageError, match="neither may be below zero"):
        StatePart("masters", elements, width)


PLAN = place(
    [unit("tile 0", 2_000_000, 4_000_000), unit("tile 1", 2_000_000, 4_000_000), unit("tile 2", 1, 1)],
    [Budget("device", 8_000_000), Budget("host", 6_100_000, window=100_000), Budget("disk", None)],
)


def test_the_table_as_text():
    assert plan_lines(PLAN) == [
        "tier    states       elements    bytes     of the budget",
        "device  parameters  2,000,000  2.00 MB             25.0%",
        "device  masters     4,000,000  4.00 MB             50.0%",
        "device  all                    6.00 MB  75.0% of 8.00 MB",
        "host    parameters  2,000,001  2.00 MB             32.8%",
        "host    masters     4,000,001  4.00 MB             65.6%",
        "host    all                    6.00 MB  98.4% of 6.10 MB",
    ]
    spilt = place(PLAN.units, [Budget("device", 0), Budget("host", 6_100_000, 100_000), Budget("disk", None)])
    assert plan_lines(spilt)[1:] == [
        "device  all                          0 B                0 B",
        "host    parameters  2,000,000    2.00 MB              32.8%",
        "host    masters     4,000,000    4.00 MB              65.6%",
        "host    on the way             100.00 KB               1.6%",
        "host    all                      6.10 MB  100.0% of 6.10 MB",
        "disk    parameters  2,000,001    2.00 MB           no limit",
        "disk    masters     4,000,001    4.00 MB           no limit",
    ]


def test_it_is_printed_plainly_where_there_is_no_terminal(capsys):
    show(PLAN, title="States")
    assert capsys.readouterr().out == "States\n" + "\n".join(plan_lines(PLAN)) + "\n"


def test_a_terminal_gets_the_same_words(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    show(PLAN, out, title="States")
    for line in plan_lines(PLAN)[1:]:
        assert all(word in out.getvalue() for word in line.split())
