"""What fits where before a job: the exact bytes of a rank, each in one tier."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.config.memory import MemoryConfig
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.memory import Spread, Widths, model_states, plan_states
from deepspeed.memory.tiers import units_of

NUMELS = [[4096, 64, 1000], [777]]
MILLION = 10**6


def held(plan):
    return [(row.tier, row.kind, row.elements) for row in plan.rows]


@given(
    st.integers(0, 3),
    st.integers(1, 5),
    st.lists(st.lists(st.integers(1, 3000), min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 4000),
    st.sampled_from([Widths(), Widths(4, 4, 0, 8), Widths(2, 2, 4, 2)]),
    st.integers(0, 20_000),
)
def test_all_bytes_of_a_rank_are_placed(stage, world, groups, tile, widths, device):
    spread = Spread(stage, world)
    exact = model_states(groups, spread, widths=widths, frozen=[5])
    try:
        plan = plan_states(groups, spread, MemoryConfig(device=device), widths=widths, frozen=[5], tile=tile)
    except DeepSpeedConfigError as error:
        assert error.path == "memory.device"
        assert stage < 3
        assert exact.params + (exact.grads if stage < 2 or world == 1 else 0) > device
        return
    kinds = {kind: sum(row.nbytes for row in plan.rows if row.kind == kind) for kind in ("parameters", "gradients")}
    assert sum(plan.used.values()) == exact.total
    assert kinds == {"parameters": exact.params, "gradients": exact.grads}
    assert plan.used["device"] <= device


def test_below_stage_3_parameters_stay_and_states_leave():
    plan = plan_states([[8 * MILLION]], Spread(2, 4), MemoryConfig(device="20MB", host="1GB"), tile=MILLION)
    assert held(plan) == [
        ("device", "parameters", 8 * MILLION),
        ("host", "masters", 2 * MILLION),
        ("host", "moments", 2 * MILLION),
        ("host", "gradients", 2 * MILLION),
    ]
    one = plan_states([[8 * MILLION]], Spread(1, 4), MemoryConfig(device="50MB"), tile=MILLION)
    assert held(one)[:2] == [("device", "parameters", 8 * MILLION), ("device", "gradients", 8 * MILLION)]
    with pytest.raises(DeepSpeedConfigError, match=r"10.00 MB are less than the 16.00 MB that stage 2 keeps whole"):
        plan_states([[8 * MILLION]], Spread(2, 4), MemoryConfig(device="10MB"))


def test_at_stage_3_parameters_leave_too():
    plan = plan_states(
        [[8 * MILLION]],
        Spread(3, 4),
        MemoryConfig(device="2MB", host="10MB", disk="1GB", path="/fast"),
        tile=MILLION,
        ranks=1,
    )
    assert [(tier, kind) for tier, kind, _ in held(plan)] == [
        ("device", "parameters"),
        ("host", "parameters"),
        ("disk", "masters"),
        ("disk", "moments"),
        ("disk", "gradients"),
    ]
    # The host of four ranks is a quarter for each.
    with pytest.raises(DeepSpeedConfigError, match=r"may use device 2.00 MB, host 2.50 MB"):
        plan_states([[8 * MILLION]], Spread(3, 4), MemoryConfig(device="2MB", host="10MB"), ranks=4, tile=MILLION)


def test_a_tile_has_elements():
    spread = Spread(3, 2)
    with pytest.raises(UsageError, match="tile is 0"):
        units_of(model_states(NUMELS, spread), spread, Widths(), tile=0)
