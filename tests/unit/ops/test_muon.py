"""Muon: the two ways of the iteration, the update of every kind of parameter, the optimizers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.muon import (
    Muon,
    MuonWithAuxAdam,
    SingleDeviceMuon,
    muon_update,
    tag_attention_heads,
)
from deepspeed.ops.muon.muon import gram_newton_schulz, newton_schulz, ns_compute_dtype, orthogonalize
from deepspeed.ops.registry import operations

WAYS = [
    pytest.param(each.load(), id=each.name)
    for each in operations()["muon_orthogonalize"].implementations
    if each.requires.holds and each.name != "reference"
]


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def of_unit_norm(x):
    return x / torch.linalg.matrix_norm(x, keepdim=True)


def conditioned(kind, m, n):
    x = normal(m, n, dtype=torch.float64)
    if kind == "low rank":
        x = normal(m, 2, seed=1, dtype=torch.float64) @ normal(2, n, seed=2, dtype=torch.float64)
    elif kind == "graded":
        x = torch.diag(10.0 ** -torch.arange(m, dtype=torch.float64)) @ x
    return of_unit_norm(x)


@pytest.mark.parametrize("kind", ["plain", "low rank", "graded"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (8, 8), (8, 12), (8, 64)])
@pytest.mark.parametrize("steps", [0, 1, 3, 4, 5, 7])
def test_both_ways_are_one_polynomial(kind, shape, steps):
    x = conditioned(kind, *shape)
    torch.testing.assert_close(gram_newton_schulz(x, steps), newton_schulz(x, steps), rtol=1e-9, atol=1e-9)
    x = x.float()
    torch.testing.assert_close(gram_newton_schulz(x, steps), newton_schulz(x, steps), rtol=1e-3, atol=1e-3)


def test_the_polynomial_acts_on_the_singular_values():
    x = of_unit_norm(normal(6, 10, dtype=torch.float64))
    left, values, right = torch.linalg.svd(x, full_matrices=False)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    torch.testing.assert_close(newton_schulz(x, 5), left @ torch.diag(values) @ right, rtol=1e-9, atol=1e-9)
    assert values.min() > 0.6
    assert values.max() < 1.3


@pytest.mark.parametrize("kind", ["plain", "low rank", "graded"])
def test_the_gram_way_stands_float16(kind):
    x = conditioned(kind, 16, 64).to(torch.float16)
    exact = newton_schulz(x.double(), 5)
    assert (gram_newton_schulz(x, 5).double() - exact).abs().max() < 0.05


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("shape", [(4, 20), (20, 4), (6, 6), (3, 4, 20), (2, 3, 20, 4), (0, 4), (2, 0, 3)])
@pytest.mark.parametrize("kernel", WAYS)
def test_every_implementation_does_as_the_reference(kernel, shape, method):
    reference = operations()["muon_orthogonalize"].implementations[-1].load()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = normal(*shape, dtype=dtype)
        mine, theirs = kernel(x, 5, method), reference(x, 5, method)
        assert mine.dtype == dtype
        bound = 1e-2 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(mine, theirs, rtol=bound, atol=bound)


def test_methods_and_matrices_are_checked():
    assert ns_compute_dtype() == ns_compute_dtype("gram") == torch.float16
    assert ns_compute_dtype("standard") == torch.bfloat16
    with pytest.raises(ValueError, match=r"'cubic'.*gram, standard"):
        orthogonalize(torch.ones(3, 3), 5, "cubic")
    with pytest.raises(ValueError, match="2 dims"):
        orthogonalize(torch.ones(3), 5, "gram")


def expected_update(grad, momentum, *, beta=0.95, nesterov=True):
    m = beta * momentum + (1 - beta) * grad
    return m, (1 - beta) * grad + beta * m if nesterov else m


def matrix_step(direction):
    rows, columns = direction.shape[-2:]
    tall = rows > columns
    x = of_unit_norm((direction.mT if tall else direction).double())
    x = newton_schulz(x, 5)
    return ((x.mT if tall else x) * max(1, rows / columns) ** 0.5).float()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("shape", [(8, 16), (16, 8), (4, 8, 16)])
def test_update_of_matrices(shape, method, nesterov):
    grad, momentum = normal(*shape), normal(*shape, seed=1) * 0.1
    kept = grad.clone()
    m, direction = expected_update(grad, momentum, nesterov=nesterov)
    update = muon_update(grad, momentum, nesterov=nesterov, ns_method=method)
    torch.testing.assert_close(momentum, m)
    torch.testing.assert_close(update, matrix_step(direction), rtol=1e-3, atol=1e-4)
    assert torch.equal(grad, kept)


def test_update_of_convolutions_experts_and_heads():
    grad = normal(4, 8, 3, 3)
    _, direction = expected_update(grad, torch.zeros_like(grad))
    update = muon_update(grad, torch.zeros_like(grad))
    torch.testing.assert_close(update, matrix_step(direction.flatten(1)).view(grad.shape), rtol=1e-3, atol=1e-4)
    experts = muon_update(grad, torch.zeros_like(grad), is_expert_group=True)
    torch.testing.assert_close(experts, matrix_step(direction.flatten(2)).view(grad.shape), rtol=1e-3, atol=1e-4)
    grad = normal(16, 3)
    _, direction = expected_update(grad, torch.zeros_like(grad))
    update = muon_update(grad, torch.zeros_like(grad), num_heads=4)
    torch.testing.assert_close(update, matrix_step(direction.view(4, 4, 3)).view(16, 3), rtol=1e-3, atol=1e-4)


def test_what_muon_cannot_update():
    with pytest.raises(ValueError, match=r"16 rows .* 3 heads"):
        muon_update(normal(16, 4), torch.zeros(16, 4), num_heads=3)
    with pytest.raises(ValueError, match=r"2 dims or more, found shape \(5,\)"):
        muon_update(normal(5), torch.zeros(5))
    with pytest.raises(ValueError, match="expert parameters of 3 dims"):
        muon_update(normal(4, 4), torch.zeros(4, 4), is_expert_group=True)


def test_a_gradient_that_is_not_finite_passes_through():
    grad, momentum = normal(4, 8), normal(4, 8, seed=1)
    grad[1, 2] = float("inf")
    before = momentum.clone()
    assert torch.equal(muon_update(grad, momentum), grad)
    assert torch.equal(momentum, before)


def test_16_bit_gradients_of_a_wide_momentum():
    grad, momentum = normal(4, 8, dtype=torch.bfloat16), torch.zeros(4, 8)
    assert muon_update(grad, momentum).dtype == torch.bfloat16
    torch.testing.assert_close(momentum, 0.05 * grad.float())


@pytest.mark.parametrize("together", [False, True])
def test_alike_parameters_together(together, monkeypatch):
    shapes = [(4, 8), (8, 4), (4, 8), (4, 8), (6, 6)]
    if together:  # the batch of three, which only accelerators take, by hand
        monkeypatch.setattr("deepspeed.ops.muon.muon.alike", lambda keys, tensors: [[0, 2, 3], [1], [4]])
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for place, param in enumerate(params):
        param.grad = normal(*param.shape, seed=place)
    params[2].grad[0, 0] = float("nan")
    momenta = [torch.zeros(shape) for shape in shapes]
    expected = [muon_update(param.grad, momentum) for param, momentum in zip(params, momenta, strict=True)]
    optimizer = Muon(params, lr=1.0)
    optimizer.step()
    for param, momentum, update in zip(params, momenta, expected, strict=True):
        torch.testing.assert_close(param.detach(), -update, rtol=1e-4, atol=1e-5, equal_nan=True)
        torch.testing.assert_close(optimizer.state[param]["momentum_buffer"], momentum)


@pytest.mark.parametrize("cls", [Muon, SingleDeviceMuon])
def test_optimizer(cls):
    param = nn.Parameter(normal(6, 12))
    start, momentum = param.detach().clone(), torch.zeros(6, 12)
    optimizer = cls([param], lr=0.1, weight_decay=0.2, momentum=0.9, ns_method="standard")
    for step in range(3):
        param.grad = normal(6, 12, seed=10 + step)
        optimizer.step()
        momentum, direction = expected_update(param.grad, momentum, beta=0.9)
        start = start * (1 - 0.1 * 0.2) - 0.1 * matrix_step(direction)
    torch.testing.assert_close(param.detach(), start, rtol=1e-4, atol=1e-5)
    assert list(optimizer.state[param]) == ["momentum_buffer"]
    defaults = {"lr": 0.02, "weight_decay": 0, "momentum": 0.95, "ns_method": "gram"}
    assert cls([param]).defaults == defaults


def halves(**adam):
    weight, bias = nn.Parameter(normal(6, 12)), nn.Parameter(normal(6, seed=1))
    return [{"params": [weight], "use_muon": True}, {"params": [bias], "use_muon": False, **adam}]


def train(optimizer, steps=3, first=0):
    for step in range(first, first + steps):
        for place, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                param.grad = normal(*param.shape, seed=50 + 10 * step + place, dtype=param.dtype)
        optimizer.step()
    return [param.detach().clone() for group in optimizer.param_groups for param in group["params"]]


def test_groups_of_both_halves():
    optimizer = MuonWithAuxAdam(halves())
    muon, adam = ({k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups)
    assert muon == {"use_muon": True, "lr": 0.02, "momentum": 0.95, "weight_decay": 0, "ns_method": "gram"}
    assert adam == {"use_muon": False, "lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0}
    train(optimizer, 2)
    states = [optimizer.state[g["params"][0]] for g in optimizer.param_groups]
    assert list(states[0]) == ["momentum_buffer"]
    assert list(states[1]) == ["step", "exp_avg", "exp_avg_sq"]
    assert states[1]["step"] == 2


@pytest.mark.parametrize("adam", [None, torch.optim.AdamW, DeepSpeedCPUAdam])
def test_each_half_does_what_it_would_alone(adam):
    mine = train(MuonWithAuxAdam(halves(lr=0.1, weight_decay=0.2), adam_optimizer=adam))
    groups = halves()
    assert torch.equal(mine[0], train(Muon(groups[0]["params"]))[0])
    reference = torch.optim.AdamW(groups[1]["params"], lr=0.1, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.2)
    for step in range(3):
        groups[1]["params"][0].grad = normal(6, seed=50 + 10 * step + 1)
        reference.step()
    torch.testing.assert_close(mine[1], groups[1]["params"][0].detach(), rtol=1e-6, atol=1e-7)


def test_adam_with_an_l2_term():
    mine = train(MuonWithAuxAdam(halves(lr=0.1, weight_decay=0.2), adam_w_mode=False))
    groups = halves()
    reference = torch.optim.Adam(groups[1]["params"], lr=0.1, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.2)
    for step in range(3):
        groups[1]["params"][0].grad = normal(6, seed=50 + 10 * step + 1)
        reference.step()
    torch.testing.assert_close(mine[1], groups[1]["params"][0].detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adam", [None, torch.optim.AdamW, DeepSpeedCPUAdam])
def test_training_goes_on_after_a_state_dict(adam, dtype):
    def make():
        groups = halves()
        for group in groups:
            group["params"] = [nn.Parameter(p.detach().to(dtype)) for p in group["params"]]
        return MuonWithAuxAdam(groups, adam_optimizer=adam)

    first, second = make(), make()
    train(first, 2)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    with torch.no_grad():
        for mine, theirs in zip(first.param_groups, second.param_groups, strict=True):
            theirs["params"][0].copy_(mine["params"][0])
    second.param_groups[1]["lr"] = first.param_groups[1]["lr"] = 0.3  # what a schedule does
    for left, right in zip(train(first, 2, first=2), train(second, 2, first=2), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("before", [None, 16, 32])
def test_momentum_of_a_wider_state_dict_goes_on_in_8_bits(before):
    wide, narrow = MuonWithAuxAdam(halves(), moment_bits=before), MuonWithAuxAdam(halves(), moment_bits=8)
    train(wide, 2)
    narrow.load_state_dict(copy.deepcopy(wide.state_dict()))
    train(narrow, 2, first=2)
    matrix = narrow.param_groups[0]["params"][0]
    assert narrow.state[matrix]["momentum_buffer"].dtype == torch.uint8
    assert narrow.state[matrix]["step"] == 2  # wider momenta are not counted


def test_an_adam_that_cannot_be_built():
    def broken(groups, **arguments):
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="no compiler"):
        MuonWithAuxAdam(halves(), adam_optimizer=broken)
    inline = MuonWithAuxAdam(halves(), adam_optimizer=broken, fallback_to_inline=True)
    for left, right in zip(train(inline), train(MuonWithAuxAdam(halves())), strict=True):
        assert torch.equal(left, right)


def test_a_group_added_later_and_a_sparse_gradient():
    optimizer = MuonWithAuxAdam(halves(), adam_optimizer=torch.optim.AdamW)
    assert optimizer.param_groups[1]["amsgrad"] is False
    later = nn.Parameter(normal(5, seed=9))
    optimizer.add_param_group({"params": [later], "use_muon": False, "lr": 0.1})
    train(optimizer, 1)
    assert not torch.equal(later, normal(5, seed=9))
    before = optimizer.param_groups[0]["params"][0].detach().clone()
    later.grad = torch.ones(5).to_sparse()
    with pytest.raises(RuntimeError, match="sparse_coo"):
        optimizer.step()
    assert torch.equal(optimizer.param_groups[0]["params"][0], before)


def test_wrong_groups():
    weight = nn.Parameter(normal(3, 3))
    for wrong, text in (
        ([{"params": [weight]}], "found keys params"),
        ([weight], "found Parameter"),
        ([{"params": [weight], "use_muon": True, "ns_method": "x"}], "ns_method is 'x'"),
        ([{"params": [weight], "use_muon": False, "betas": (1.0, 2.0)}], "betas"),
    ):
        with pytest.raises(ValueError, match=text):
            MuonWithAuxAdam(wrong)
    bias = nn.Parameter(normal(3))
    bias.grad = normal(3)
    with pytest.raises(ValueError, match="Adam half"):
        MuonWithAuxAdam([{"params": [bias], "use_muon": True}]).step()
    with pytest.raises(RuntimeError, match="step_id"):
        MuonWithAuxAdam([{"params": [weight], "use_muon": True}]).step(step_id=3)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(6, 8)
        self.k_proj = nn.Linear(6, 4)
        self.o_proj = nn.Linear(8, 6)
        self.v_proj = nn.Linear(6, 5)  # does not split
        self.config = {"num_attention_heads": 4, "num_key_value_heads": 2}


def test_heads():
    model = Attention()
    assert tag_attention_heads(model) == {"q_proj.weight": 4, "k_proj.weight": 2}
    assert model.q_proj.weight.muon_num_heads == 4
    assert not hasattr(model.o_proj.weight, "muon_num_heads")
    assert tag_attention_heads(nn.Linear(2, 2)) == {}
    weight = model.q_proj.weight
    start, weight.grad = weight.detach().clone(), normal(8, 6)
    update = muon_update(weight.grad, torch.zeros(8, 6), num_heads=4)
    Muon([weight], lr=0.5).step()
    torch.testing.assert_close(weight.detach(), start - 0.5 * update)


def test_orthogonalize_refuses_an_unknown_method():
    with pytest.raises(ValueError, match="ns_method"):
        orthogonalize(torch.ones(2, 2), 5, "x")
