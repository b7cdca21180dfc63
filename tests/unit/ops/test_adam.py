"""Adam: every implementation against the reference and against torch.optim, the two classes, steps taken back."""

from __future__ import annotations

import itertools

import pytest
import torch

from deepspeed.ops.adam import AdamRule, DeepSpeedCPUAdam, FusedAdam, adam_reference
from deepspeed.ops.one_pass import Conditions
from deepspeed.ops.registry import operations

WAYS = [
    pytest.param(each.load(), id=each.name)
    for each in operations()["adam"].implementations
    if each.requires.holds and each.name != "reference"
]

# (param, grad, moments)
DTYPES = [
    (torch.float32, torch.float32, torch.float32),
    (torch.float64, torch.float64, torch.float64),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16, torch.float32),
    (torch.float16, torch.float16, torch.float32),
    (torch.float32, torch.bfloat16, torch.float32),
    (torch.float32, torch.float32, torch.bfloat16),
]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-6, torch.float64: 1e-13}
SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 4), (1000,), (0,), (4, 0)]
RULES = [
    AdamRule(lr=1e-2),
    AdamRule(lr=1e-2, weight_decay=0.1),
    AdamRule(lr=1e-2, weight_decay=0.1, decoupled=False),
    AdamRule(lr=3e-3, beta1=0.5, beta2=0.9, eps=1e-4, weight_decay=0.3, bias_correction=False),
    AdamRule(lr=3e-3, beta1=0.0, beta2=0.5, weight_decay=0.3, decoupled=False, bias_correction=False),
]


def tensors(dtype, seed, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def assert_close(actual, expected):
    for left, right in zip(actual, expected, strict=True):
        assert left.dtype == right.dtype
        bound = TOLERANCE[left.dtype]
        torch.testing.assert_close(left, right, rtol=bound, atol=bound)


@pytest.mark.parametrize("rule", RULES, ids=range(len(RULES)))
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(x).removeprefix("torch.") for x in d))
@pytest.mark.parametrize("kernel", WAYS)
def test_every_implementation_does_as_the_reference(kernel, dtypes, rule):
    param_dtype, grad_dtype, state_dtype = dtypes
    states = [
        [tensors(param_dtype, 0), tensors(state_dtype, 1), [t.abs() for t in tensors(state_dtype, 2)]] for _ in range(2)
    ]
    for step in range(1, 5):
        # the reference starts each step from the same bits: 16-bit roundings must not add up in the comparison
        states[1] = [[t.clone() for t in part] for part in states[0]]
        for run, (p, m, v) in zip((kernel, adam_reference), states, strict=True):
            run(p, tensors(grad_dtype, 10 + step), m, v, step, rule)
        for mine, theirs in zip(*states, strict=True):
            assert_close(mine, theirs)


@pytest.mark.parametrize("kernel", WAYS)
@pytest.mark.parametrize("layout", ["transposed", "gaps", "gradient only"])
def test_memory_layout_does_not_matter(kernel, layout):
    def make():
        p, g, m, v = (torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(4))
        if layout == "transposed":
            p, m, v = p.t(), m.t(), v.t()
            g = g.reshape(4, 6)
        elif layout == "gaps":
            p = torch.stack([p, p], -1)[..., 0]
        else:
            g = g.t().contiguous().t()
        return [[p], [g], [m], [v.abs()]]

    mine, theirs = make(), make()
    kernel(*mine, 3, RULES[1])
    adam_reference(*theirs, 3, RULES[1])
    for left, right in zip(mine, theirs, strict=True):
        assert_close(left, right)


@pytest.mark.parametrize("kernel", WAYS)
def test_empty_lists(kernel):
    kernel([], [], [], [], 1, RULES[0])


def test_large_narrow_tensors_are_cut_into_pieces(monkeypatch):
    monkeypatch.setattr("deepspeed.ops.optimizer.WIDE_ELEMENTS", 64)
    kernel = next(each.load() for each in operations()["adam"].implementations if each.name == "foreach")
    shapes = [(1000,), (3,), (60,), (5,), (0,), (129,)]
    groups = [[tensors(d, s, shapes) for s, d in enumerate((torch.bfloat16,) * 2 + (torch.float32,) * 2)] for _ in "ab"]
    for group, run in zip(groups, (kernel, adam_reference), strict=True):
        group[3] = [t.abs() for t in group[3]]
        run(*group, 2, RULES[1])
    for left, right in zip(*groups, strict=True):
        assert_close(left, right)


def train(optimizer, params, steps=6, dtype=torch.float32):
    for step in range(steps):
        for param, grad in zip(params, tensors(dtype, 100 + step, [p.shape for p in params]), strict=True):
            param.grad = grad
        optimizer.step()


def parameters(dtype=torch.float32, shapes=((4, 3), (5,), ())):
    return [torch.nn.Parameter(t) for t in tensors(dtype, 7, shapes)]


@pytest.mark.parametrize("forced", ["reference", "foreach", "fused"])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("cls", [FusedAdam, DeepSpeedCPUAdam])
def test_equal_to_torch(cls, decoupled, forced, monkeypatch):
    monkeypatch.setenv("DS_OP_ADAM", forced)
    operations()["adam"].forget()
    try:
        mode = {"adam_w_mode" if cls is FusedAdam else "adamw_mode": decoupled}
        mine, theirs = parameters(), parameters()
        groups = [[{"params": p[:1], "lr": 0.1}, {"params": p[1:], "weight_decay": 0.2}] for p in (mine, theirs)]
        numbers = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.05}
        train(cls(groups[0], **numbers, **mode), mine)
        train((torch.optim.AdamW if decoupled else torch.optim.Adam)(groups[1], **numbers), theirs)
        for left, right in zip(mine, theirs, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-7)
    finally:
        monkeypatch.delenv("DS_OP_ADAM")
        operations()["adam"].forget()


def test_fused_is_the_choice_here():
    assert operations()["adam"].implementations[0].name == "fused"
    assert operations()["adam"].implementations[0].requires.holds


@pytest.mark.parametrize("cls", [FusedAdam, DeepSpeedCPUAdam])
def test_without_bias_correction(cls):
    (param,) = parameters(shapes=((50,),))
    start, grad = param.detach().clone(), torch.randn(50)
    param.grad = grad
    cls([param], lr=0.1, bias_correction=False).step()
    expected = start - 0.1 * (0.1 * grad) / ((0.001 * grad**2).sqrt() + 1e-8)
    torch.testing.assert_close(param.detach(), expected, rtol=1e-5, atol=1e-6)


def test_dtype_of_the_moments():
    for cls, arguments, expected in [
        (DeepSpeedCPUAdam, {}, torch.float32),
        (DeepSpeedCPUAdam, {"fp32_optimizer_states": False}, torch.bfloat16),
        (FusedAdam, {}, torch.bfloat16),
    ]:
        params = parameters(torch.bfloat16)
        optimizer = cls(params, **arguments)
        train(optimizer, params, 1, torch.bfloat16)
        state = optimizer.state[params[0]]
        assert list(state) == ["step", "exp_avg", "exp_avg_sq"]
        assert (state["step"], state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (1, expected, expected)


def test_wide_moments_survive_a_state_dict():
    params, again = parameters(torch.bfloat16), parameters(torch.bfloat16)
    first, second = DeepSpeedCPUAdam(params), DeepSpeedCPUAdam(again)
    train(first, params, 3, torch.bfloat16)
    second.load_state_dict(first.state_dict())
    assert second.state[again[0]]["exp_avg"].dtype == torch.float32
    assert torch.equal(second.state[again[0]]["exp_avg"], first.state[params[0]]["exp_avg"])


def test_a_state_of_torch_is_taken_over():
    params, again = parameters(), parameters()
    theirs, mine = torch.optim.AdamW(params, lr=1e-2), FusedAdam(again, lr=1e-2)
    train(theirs, params, 3)
    with torch.no_grad():
        for target, source in zip(again, params, strict=True):
            target.copy_(source)
    saved = theirs.state_dict()
    saved["state"] = {k: {n: t.clone() for n, t in s.items()} for k, s in saved["state"].items()}
    mine.load_state_dict(saved)
    assert mine.state[again[0]]["step"] == 3
    train(theirs, params, 2)
    train(mine, again, 2)
    torch.testing.assert_close(again[0], params[0], rtol=1e-6, atol=1e-7)


def test_a_group_with_a_step_starts_there():
    (param,) = parameters(shapes=((3,),))
    optimizer = FusedAdam([{"params": [param], "step": 5}])
    train(optimizer, [param], 1)
    assert optimizer.state[param]["step"] == 6


def strange():
    """What a rank may hold: a usual piece, a narrow one, one with gaps, an empty one, one without a gradient."""
    usual, narrow, gaps, empty, absent = parameters(shapes=((4, 3), (5,), (6, 4), (0,), (2,)))
    narrow.data = narrow.data.to(torch.bfloat16)
    gaps.data = gaps.data.t()
    return [usual, narrow, gaps, empty, absent]


def give(params, factor=1.0):
    for place, param in enumerate(params[:-1]):
        param.grad = torch.full(param.shape, 0.1 * (place + 1), dtype=param.dtype) * factor


def test_conditions_divide_whatever_the_parameters_are():
    mine, plain = strange(), strange()
    under, free = FusedAdam(mine, weight_decay=0.1), FusedAdam(plain, weight_decay=0.1)
    under.conditions = Conditions(torch.tensor(4.0), torch.tensor(0.0))
    for _ in range(3):
        give(mine, 4.0)
        give(plain)
        under.step()
        free.step()
    for left, right in zip(snapshot(under, mine), snapshot(free, plain), strict=True):
        torch.testing.assert_close(left, right)


def test_conditions_skip_whatever_the_parameters_are():
    params = strange()
    optimizer = FusedAdam(params)
    give(params)
    optimizer.step()
    before = snapshot(optimizer, params)
    optimizer.conditions = Conditions(torch.tensor(float("nan")), torch.tensor(1.0))
    give(params, float("inf"))
    optimizer.step()
    optimizer.take_back()
    assert same(snapshot(optimizer, params), before)


@pytest.mark.parametrize(
    "params", [[], parameters(), [torch.nn.Parameter(torch.empty(0))]], ids=["none", "idle", "empty"]
)
def test_a_step_under_conditions_with_nothing_to_update(params):
    optimizer = FusedAdam([torch.nn.Parameter(torch.empty(0))])
    optimizer.param_groups[0]["params"] = params
    before = snapshot(optimizer, params)
    optimizer.conditions = Conditions(torch.tensor(1.0), torch.tensor(1.0))
    optimizer.step()
    optimizer.take_back()
    assert same(snapshot(optimizer, params), before)


@pytest.mark.parametrize("forced", ["reference", "foreach", "fused"])
def test_ranks_agree_on_conditions_whatever_each_holds(forced, monkeypatch):
    """A rank that answers otherwise would publish a step that the others do not."""
    monkeypatch.setenv("DS_OP_ADAM", forced)
    operations()["adam"].forget()
    try:
        held = [parameters(), parameters(torch.bfloat16), strange(), [torch.nn.Parameter(torch.empty(0))]]
        give(held[0])
        for params in held:
            optimizer = FusedAdam(params)
            assert optimizer.takes_conditions(torch.device("cuda", 0)) == (forced == "fused")
            assert not optimizer.takes_conditions(torch.device("cpu"))
            optimizer.param_groups[0]["params"] = []
            assert optimizer.takes_conditions(torch.device("cuda", 0)) == (forced == "fused")
    finally:
        monkeypatch.delenv("DS_OP_ADAM")
        operations()["adam"].forget()


def snapshot(optimizer, params):
    return [
        (p.detach().clone(), {k: v.clone() if torch.is_tensor(v) else v for k, v in optimizer.state.get(p, {}).items()})
        for p in params
    ]


def same(left, right):
    return all(
        torch.equal(a, b)
        and x.keys() == y.keys()
        and all(torch.equal(x[k], y[k]) if torch.is_tensor(x[k]) else x[k] == y[k] for k in x)
        for (a, x), (b, y) in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("earlier", [0, 3])
def test_a_subgroup_step_is_undone_bit_for_bit(earlier, dtype):
    params = parameters(dtype)
    optimizer = DeepSpeedCPUAdam([{"params": params[:2]}, {"params": params[2:], "lr": 0.5}], lr=0.1, weight_decay=0.1)
    train(optimizer, params, earlier, dtype)
    for p in params:
        p.grad = torch.full_like(p, 1e-3)
    before = snapshot(optimizer, params)
    held = [optimizer.state[p].get("exp_avg") for p in params[:2]] if earlier else []
    optimizer.step_subgroup(0)
    after = snapshot(optimizer, params)
    assert not same(after[:2], before[:2])
    assert same(after[2:], before[2:])
    optimizer.rollback_subgroup(0)
    assert same(snapshot(optimizer, params), before)
    assert all(optimizer.state[p]["exp_avg"] is t for p, t in zip(params[:2], held, strict=False))
    optimizer.step_subgroup(0)
    assert same(snapshot(optimizer, params), after)


def test_all_subgroups_make_one_step():
    one, many = parameters(), parameters()
    whole = DeepSpeedCPUAdam([{"params": [p]} for p in one], lr=0.1)
    parts = DeepSpeedCPUAdam([{"params": [p]} for p in many], lr=0.1)
    train(whole, one, 1)
    for target, source in zip(many, one, strict=True):
        target.grad = source.grad
    for index in (2, 0, 1):
        parts.step_subgroup(index)
    assert all(torch.equal(a, b) for a, b in zip(one, many, strict=True))


def test_only_the_last_subgroup_step_is_undone_and_only_once():
    params = parameters()
    optimizer = DeepSpeedCPUAdam(params)
    train(optimizer, params, 1)
    with pytest.raises(RuntimeError, match="no step to roll back"):
        optimizer.rollback_subgroup(0)
    for ending in (lambda: optimizer.rollback_subgroup(0), optimizer.step):
        optimizer.step_subgroup(0)
        ending()
        with pytest.raises(RuntimeError, match="no step to roll back"):
            optimizer.rollback_subgroup(0)
    for call, wrong in itertools.product((optimizer.step_subgroup, optimizer.rollback_subgroup), (1, -1)):
        with pytest.raises(IndexError, match=f"no subgroup {wrong}.*1 param groups"):
            call(wrong)


def test_subgroup_closures():
    params = parameters()
    optimizer = DeepSpeedCPUAdam(params)

    def closure():
        optimizer.zero_grad()
        loss = sum((p**2).sum() for p in params)
        loss.backward()
        return loss

    start = snapshot(optimizer, params)
    loss = optimizer.step_subgroup(0, closure)
    assert optimizer.rollback_subgroup(0, closure) == loss
    assert same(snapshot(optimizer, params), start)
