"""Gates: the published routes to the number, and rules that hold for any logits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import UsageError
from deepspeed.moe import sharded_moe
from deepspeed.moe.exchange import by_slots, combine, in_order, to_rows
from deepspeed.moe.routing import places_within, route_top1, route_top2, route_topk
from deepspeed.moe.sharded_moe import TopKGate, top1gating, top2gating, topkgating

# What DeepSpeed 0.19.8 returned for these logits after torch.manual_seed(seed): the entries of the combine weights that
# are not 0 as [token, expert, place, weight], and the next random number, by which random numbers are known to be
# drawn alike.
PUBLISHED = json.loads((Path(__file__).parent / "published_routes.json").read_text())


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: f"{case['name']} {case['seed']}")
def test_published_routes(case):
    logits = torch.tensor(case["logits"])
    torch.manual_seed(case["seed"])
    gating = getattr(sharded_moe, case["function"])
    loss, combine, mask, counts = gating(logits, **case["options"])
    assert torch.rand(1).item() == pytest.approx(case["after"], abs=1e-6)
    assert loss.item() == pytest.approx(case["loss"], rel=1e-5)
    assert combine.shape[2] == case["capacity"]
    assert counts.tolist() == case["counts"]
    assert combine.nonzero().tolist() == [route[:3] for route in case["routes"]]
    torch.testing.assert_close(combine[combine > 0], torch.tensor([r[3] for r in case["routes"]]), rtol=1e-4, atol=1e-6)
    assert torch.equal(mask, combine > 0)
    torch.manual_seed(case["seed"])
    sparse = gating(logits, **case["options"], sparse_routes=True)
    assert (sparse[1].item(), sparse[2]) == (case["capacity"], logits.shape[1])
    found = sorted(
        [token, sparse[3][choice, token].item(), sparse[4][choice, token].item()]
        for choice in range(len(sparse[3]))
        for token in range(len(logits))
        if sparse[3][choice, token] >= 0
    )
    assert found == [route[:3] for route in case["routes"]]


@given(st.lists(st.integers(0, 4), max_size=40))
def test_places_are_those_of_a_loop(experts):
    seen = [0] * 5
    expected = []
    for expert in experts:
        expected.append(seen[expert])
        seen[expert] += 1
    assert places_within(torch.tensor(experts, dtype=torch.int64), 5).tolist() == expected


@st.composite
def routed(draw):
    tokens, experts = draw(st.integers(1, 20)), draw(st.integers(2, 6))
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(draw(st.integers(0, 999))))
    capacity = draw(st.none() | st.integers(1, 5))
    k = draw(st.integers(1, 3))
    if k == 1:
        lottery = torch.rand_like if draw(st.booleans()) else None
        used = torch.rand(tokens) > 0.3 if draw(st.booleans()) else None
        return route_top1(logits, capacity, used=used, lottery=lottery), capacity
    if k == 2:
        return route_top2(logits, capacity), capacity
    return route_topk(logits, min(3, experts), capacity, by_position=draw(st.booleans())), capacity


@given(routed())
def test_routes_fill_experts_from_the_front(made):
    routes, capacity = made
    for expert in range(routes.num_experts):
        places = sorted(routes.places[routes.kept & (routes.experts == expert)].tolist())
        if routes.experts.shape[0] != 2:  # second choices come behind first ones, also behind dropped ones
            assert places == list(range(len(places)))
        assert capacity is None or len(places) <= capacity
    assert routes.weights[~routes.kept].eq(0).all()
    for token in range(routes.experts.shape[1]):
        chosen = routes.experts[:, token].tolist()
        assert len(set(chosen)) == len(chosen)


@given(routed(), st.integers(1, 4))
def test_tokens_come_back_with_their_weights(made, width):
    routes, capacity = made
    tokens = torch.randn(routes.experts.shape[1], width, dtype=torch.float64, requires_grad=True)
    expected = tokens * routes.weights.sum(0).unsqueeze(1)
    plans = [in_order(routes.experts, routes.num_experts)[0]] + (
        [] if capacity is None else [by_slots(routes, capacity)]
    )
    for plan in plans:
        found = combine(to_rows(tokens, plan), routes.weights.double(), plan)
        torch.testing.assert_close(found, expected.double(), rtol=1e-6, atol=1e-7)
        (grad,) = torch.autograd.grad(found.sum(), tokens)
        torch.testing.assert_close(grad, routes.weights.sum(0).double().unsqueeze(1).expand_as(grad), rtol=1e-6, atol=0)


def test_unused_tokens_have_no_expert():
    used = torch.tensor([1, 0, 1, 0])
    loss, combine, _, counts = top1gating(torch.zeros(4, 2), 1.0, 0, used_token=used, use_rts=False)
    assert combine.sum((1, 2)).tolist() == [0.5, 0.0, 0.5, 0.0]
    assert counts.tolist() == [2, 0]
    assert loss.item() == pytest.approx(0.5)


def test_without_lots_the_first_tokens_stay():
    combine = top1gating(torch.tensor([[1.0, 0.0]] * 4), 1.0, 0, use_rts=False)[1]
    assert combine.sum((1, 2)).gt(0).tolist() == [True, True, False, False]


@pytest.mark.parametrize("gating", [top1gating, top2gating])
def test_logits_stay_as_they_are(gating):
    logits = torch.randn(6, 3)
    before = logits.clone()
    gating(logits, 1.0, 1)
    assert torch.equal(logits, before)


def test_what_gates_refuse():
    with pytest.raises(UsageError, match=r"min_capacity is 4, but there are only 3 tokens"):
        top1gating(torch.randn(3, 2), 1.0, 4)
    with pytest.raises(UsageError, match="drop_policy is 'x'"):
        topkgating(torch.randn(3, 4), 2, 1.0, 0, drop_policy="x")
    with pytest.raises(UsageError, match="k is 5"):
        topkgating(torch.randn(3, 4), 5, 1.0, 0)
    with pytest.raises(UsageError, match="k is 5; with 4 experts"):
        TopKGate(8, 4, k=5)


def test_a_gate_has_another_capacity_in_eval():
    gate = TopKGate(4, 2, k=1, capacity_factor=1.0, eval_capacity_factor=2.0, min_capacity=0)
    tokens = torch.randn(6, 4)
    assert gate(tokens)[1].shape[2] == gate.route(tokens).capacity == 3
    gate.eval()
    assert gate(tokens)[1].shape[2] == gate.route(tokens).capacity == 6


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("policy", [None, "Jitter", "RSample"])
def test_a_gate_routes_as_it_returns(k, policy):
    gate = TopKGate(4, 5, k=k, noisy_gate_policy=policy, min_capacity=1)
    tokens = torch.randn(9, 4)
    torch.manual_seed(0)
    loss, _, _, experts, places, weights, counts = gate(tokens, sparse_routes=True)
    torch.manual_seed(0)
    routes = gate.route(tokens)
    assert torch.equal(torch.where(routes.kept, routes.experts, -1), experts.long())
    assert torch.equal(routes.places, places.long())
    for mine, theirs in ((routes.loss, loss), (routes.weights, weights), (routes.counts, counts)):
        assert torch.equal(mine, theirs)
