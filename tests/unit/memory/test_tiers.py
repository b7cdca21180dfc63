"""What fits where before a job: the exact bytes of a rank, each in one tier."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.config.memory import MemoryConfig
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.memory import Spread, Widths, model_states, plan_states

NUMELS = [[4096, 64, 1000], [777]]
MILLION = 10**6


def held(plan):
    return [(row.tier, row.kind, row.elements) for row in plan.rows]


@given(
    st.integers(0, 3),
    st.integers(1, 5),
    st.lists(st.lists(st.integers(1, 3000), min_size=1, max_size=4), min_size=1, max_size=3),
    st.sampled_from([Widths(), Widths(4, 4, 0, 8), Widths(2, 2, 4, 2.0625)]),
    st.integers(0, 20_000),
)
def test_all_states_of_a_rank_are_placed(stage, world, groups, widths, device):
    spread = Spread(stage, world)
    exact = model_states(groups, spread, widths=widths, frozen=[5])
    counts = model_states(groups, spread, widths=Widths(1, 1, 1, 1), frozen=[5])
    try:
        plan = plan_states(groups, spread, MemoryConfig(device=device), widths=widths, frozen=[5])
    except DeepSpeedConfigError as error:
        assert error.path == "memory.device"
        assert stage < 3
        assert exact.params > device
        return
    assert plan.used["device"] <= device
    if exact.total <= device:
        assert sum(plan.used.values()) == exact.total
        return
    assert sum(plan.elements("parameters").values()) == counts.params
    # whoever leaves takes its gradient along, and has a master of its own there
    for kind in ("masters", "moments", "gradients"):
        assert sum(plan.elements(kind).values()) == counts.optimizer
        assert plan.elements(kind) == plan.elements("moments")
    away = plan.elements("moments")["host"]
    assert plan.used["host"] >= away * (widths.master or widths.param)
    assert "host" in plan.tiers or stage == 1  # which has whole gradients only while everything is on the device


def test_below_stage_3_parameters_stay_and_states_leave():
    plan = plan_states([[MILLION] * 8], Spread(2, 4), MemoryConfig(device="20MB", host="1GB"))
    assert held(plan) == [
        ("device", "parameters", 8 * MILLION),
        ("host", "masters", 2 * MILLION),
        ("host", "moments", 2 * MILLION),
        ("host", "gradients", 2 * MILLION),
    ]
    one = plan_states([[MILLION] * 8], Spread(1, 4), MemoryConfig(device="80MB"))
    assert ("device", "gradients", 8 * MILLION) in held(one)
    leaving = plan_states([[MILLION] * 8], Spread(1, 4), MemoryConfig(device="40MB"))
    assert ("device", "gradients", MILLION) in held(leaving)
    assert ("host", "gradients", MILLION) in held(leaving)
    with pytest.raises(DeepSpeedConfigError, match=r"10.00 MB are less than the 16.00 MB that stage 2 keeps whole"):
        plan_states([[MILLION] * 8], Spread(2, 4), MemoryConfig(device="10MB"))


def test_at_stage_3_parameters_leave_too():
    sizes, spread = [[(name, 4 * MILLION) for name in ("first", "second", "third", "last")]], Spread(3, 4)
    section = MemoryConfig(device="2MB", host="62MB", disk="1GB", path="/fast")
    plan = plan_states(sizes, spread, section, tile=MILLION)
    assert [(tier, kind) for tier, kind, _ in held(plan)] == [
        ("device", "parameters"),
        ("host", "parameters"),
        ("host", "gradients"),
        ("host", "on the way"),
        ("disk", "masters"),
        ("disk", "moments"),
    ]
    # The host of four ranks is a quarter for each.
    with pytest.raises(DeepSpeedConfigError, match=r"may use device 2.00 MB, host 2.50 MB.*from 'third'"):
        plan_states(sizes, spread, MemoryConfig(device="2MB", host="10MB"), ranks=4)
    small = MemoryConfig(device="2MB", host="40MB", disk="1GB", path="/fast")
    with pytest.raises(DeepSpeedConfigError, match=r"36.00 MB there for what is on its way .* and 16.00 MB there"):
        plan_states(sizes, spread, small, tile=MILLION)


def test_parameters_that_stay_whole_are_on_the_device():
    sizes, spread = [[100] * 4, [4000]], Spread(3, 2, persistent=100)
    plan = plan_states(sizes, spread, MemoryConfig(device=800 + 400))
    assert ("device", "whole parameters", 400) in held(plan)
    assert ("host", "parameters", 2000) in held(plan)
    with pytest.raises(DeepSpeedConfigError, match=r"memory.device: .* use 700 B .* 800 B there for what cannot"):
        plan_states(sizes, spread, MemoryConfig(device=700))


def test_a_master_that_is_the_parameter_takes_memory_only_elsewhere():
    plan = plan_states([[100, 100]], Spread(0, 1), MemoryConfig(device=800 + 1200), widths=Widths(4, 4, 0, 8))
    assert plan.used == {"device": 800 + 1200, "host": 1600}


def test_a_tile_has_elements():
    with pytest.raises(UsageError, match="tile is 0"):
        plan_states(NUMELS, Spread(3, 2), MemoryConfig(), tile=0)
