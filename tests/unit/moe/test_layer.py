"""The layer on one rank: parity with a loop over experts, neighbours of the usual case, and the experts' parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.moe.experts import Experts, lay_side_by_side, merged, read, stacked
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import (
    configure_moe_param_groups,
    has_moe_layers,
    is_moe_param,
    split_params_into_different_moe_groups_for_optimizer,
    split_params_into_shared_and_expert_params,
)
from deepspeed.ops.grouped import Groups, grouped_linear

WIDTH = 6


class Gated(nn.Module):
    """As in the feed-forward layers of today."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 5, bias=False), nn.Linear(5, WIDTH)

    def forward(self, rows):
        return self.down(nn.functional.silu(self.gate(rows)) * self.up(rows))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, rows):
        return self.norm(self.inner(rows)), "a bias"


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows):
        return self.inner(rows) if bool(rows.isfinite().all()) else rows


EXPERTS = {
    "sequence": (nn.Sequential(nn.Linear(WIDTH, 4), nn.GELU(), nn.Linear(4, WIDTH)), True),
    "gated": (Gated(), True),
    "norm": (Normed(), False),
    "branches": (Branching(), False),
}


def by_loop(layer, tokens):
    """Every expert computes every token; the gate's weights choose."""
    routes = layer.deepspeed_moe.gate.route(tokens)
    total = torch.zeros_like(tokens)
    for number, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
        out = expert(tokens)
        out = out[0] if isinstance(out, tuple) else out
        total = total + out * (routes.weights * (routes.experts == number)).sum(0).unsqueeze(1)
    return total, routes.loss


@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("drops", [True, False])
def test_a_loop_over_experts(kind, k, drops):
    expert, as_one = EXPERTS[kind]
    torch.manual_seed(k)
    layer = MoE(WIDTH, expert, 4, k=k, drop_tokens=drops, capacity_factor=0.5, min_capacity=1).double()
    for param in layer.parameters():
        nn.init.normal_(param)
    assert layer.deepspeed_moe.experts.as_one == as_one
    tokens = torch.randn(9, WIDTH, dtype=torch.float64, requires_grad=True)
    results = []
    for compute in (lambda: layer(tokens)[:2], lambda: by_loop(layer, tokens)):
        torch.manual_seed(1)
        out, loss = compute()
        wanted = [tokens, *layer.parameters()]
        results.append([out, loss, *torch.autograd.grad(out.sin().sum() + loss, wanted)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)  # the gate computes in float32


@pytest.mark.parametrize(("tokens", "k"), [(1, 1), (3, 2), (2, 3)])
def test_fewer_tokens_than_experts(tokens, k):
    layer = MoE(WIDTH, EXPERTS["gated"][0], 8, k=k, min_capacity=1)
    out, _, counts = layer(torch.randn(tokens, WIDTH))
    assert counts.sum().item() == tokens * k
    out.sum().backward()
    grads = [param.grad for param in layer.deepspeed_moe.experts.parameters()]
    assert all(grad is not None for grad in grads), "an expert without tokens has a gradient of zeros"


def test_shapes_and_capacity_of_one():
    layer = MoE(WIDTH, EXPERTS["sequence"][0], 4, k=1, capacity_factor=0.01, min_capacity=1, use_rts=False)
    out, _, counts = layer(torch.randn(2, 5, WIDTH))
    assert out.shape == (2, 5, WIDTH)
    assert out.flatten(0, 1).abs().sum(1).gt(0).sum().item() == (counts > 0).sum().item()


def test_eval_capacity_lets_more_tokens_through():
    layer = MoE(WIDTH, EXPERTS["sequence"][0], 2, capacity_factor=0.5, eval_capacity_factor=2.0, min_capacity=0)
    tokens = torch.randn(16, WIDTH)
    kept = [layer.train(mode)(tokens)[0].abs().sum(1).gt(0).sum().item() for mode in (True, False)]
    assert kept[0] <= 8
    assert kept[1] == 16


def test_residual():
    layer = MoE(WIDTH, EXPERTS["sequence"][0], 2, use_residual=True, min_capacity=0)
    tokens = torch.randn(4, WIDTH)
    torch.manual_seed(0)
    out = layer(tokens)[0]
    torch.manual_seed(0)
    experts = layer.deepspeed_moe(tokens)
    shares = torch.softmax(layer.coefficient(tokens), -1)
    torch.testing.assert_close(out, experts * shares[:, :1] + layer.mlp(tokens) * shares[:, 1:])


def test_bfloat16_gates_in_float32():
    layer = MoE(WIDTH, EXPERTS["sequence"][0], 4, k=2, drop_tokens=False).bfloat16()
    out, loss, _ = layer(torch.randn(32, WIDTH, dtype=torch.bfloat16))
    assert (out.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    out.float().sum().backward()
    assert layer.deepspeed_moe.gate.wg.weight.grad.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer.float()(torch.randn(32, WIDTH))[0].dtype == torch.bfloat16


def test_what_a_layer_refuses():
    with pytest.raises(UsageError, match="num_experts is 6 and ep_size is 4"):
        MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 6, ep_size=4)
    with pytest.raises(UsageError, match="noisy_gate_policy is 'loud'"):
        MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 2, noisy_gate_policy="loud")
    layer = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 4, ep_size=2)
    with pytest.raises(UsageError, match="spread over 2 ranks, which are not known"):
        layer(torch.randn(8, WIDTH))


def test_experts_compute_slices():
    experts = Experts(EXPERTS["gated"][0], 3, "ep_size_2")
    given = torch.randn(2, 3, 4, WIDTH)
    expected = [expert(given[:, number]) for number, expert in enumerate(experts.deepspeed_experts)]
    torch.testing.assert_close(experts(given), torch.stack(expected, 1))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.scale = nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.1), 1.0

    def forward(self, rows):
        return self.act(self.up(rows)) * self.scale * (2.0 if self.training else 1.0)


def patched(module):
    module.forward = lambda rows: rows * 7


CHANGES = {
    "nothing": lambda one, other: None,
    "mode": lambda one, other: (one.eval(), other.eval()),
    "attribute": lambda one, other: [setattr(each, "scale", 3.0) for each in (one, other)],
    "attribute of one": lambda one, other: setattr(other, "scale", 3.0),
    "setting": lambda one, other: setattr(other.act, "negative_slope", 0.9),
    "activation": lambda one, other: setattr(other, "act", nn.ReLU()),
    "layer": lambda one, other: setattr(other, "up", nn.Linear(WIDTH, WIDTH)),
    "hook": lambda one, other: other.register_forward_hook(lambda _, args, out: out * 2),
    "hook of the activation": lambda one, other: other.act.register_forward_hook(lambda _, args, out: out * 2),
    "hook of the layer": lambda one, other: other.up.register_forward_hook(lambda _, args, out: out * 2),
    "forward": lambda one, other: patched(other),
    "forward of the layer": lambda one, other: patched(other.up),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("used", [False, True])
def test_experts_compute_what_they_are_now(what, used):
    """Whatever was changed since the steps of an expert were read, also after they have run."""
    experts = Experts(Scaled(), 2)
    given = torch.randn(4, WIDTH)
    if used:
        experts(given, groups=Groups(2, length=2))
    CHANGES[what](*experts.deepspeed_experts)
    found = experts(given, groups=Groups(2, length=2))
    expected = [expert(given[2 * at : 2 * at + 2]) for at, expert in enumerate(experts.deepspeed_experts)]
    torch.testing.assert_close(found, torch.cat(expected))


def test_experts_that_change_together_still_run_as_one():
    experts = Experts(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)), 2)
    for expert in experts.deepspeed_experts:
        expert[1].p = 0.0
    given = torch.randn(4, WIDTH)
    expected = [expert(given[2 * at : 2 * at + 2]) for at, expert in enumerate(experts.deepspeed_experts)]
    torch.testing.assert_close(experts(given, groups=Groups(2, length=2)), torch.cat(expected))
    assert experts.as_one


def test_a_structure_is_read_only_where_rows_are_alike():
    assert read(nn.Sequential(nn.Linear(2, 2), nn.Softmax(dim=0))) is None
    assert read(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))) is None
    assert read(nn.Sequential(nn.ReLU())) is None
    assert read(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))) is not None


def test_stacked_without_a_copy_where_that_can_be():
    memory = torch.arange(24.0)
    near = [nn.Parameter(memory[at : at + 4].view(2, 2)) for at in (0, 10, 20)]
    found = stacked(near)
    assert found.data_ptr() == memory.data_ptr()
    assert torch.equal(found, torch.stack(near))
    (found * torch.arange(3.0).view(3, 1, 1)).sum().backward()
    assert [param.grad.sum().item() for param in near] == [0.0, 4.0, 8.0]
    assert stacked(list(reversed(near))).data_ptr() != memory.data_ptr()
    assert torch.equal(stacked(list(reversed(near))), torch.stack(list(reversed(near))))


class Wide(nn.Module):
    """Gate and value in either order."""

    def __init__(self, *, gate_first: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.turned = not gate_first
        self.down = nn.Linear(8, WIDTH)
        self.w1, self.w2 = (nn.Linear(WIDTH, 8, bias=bias) for _ in range(2))
        self.act = nn.GELU(approximate="tanh")

    def forward(self, rows):
        value, gate = (self.w1(rows), self.w2(rows)) if self.turned else (self.w2(rows), self.w1(rows))
        return self.down(value * self.act(gate))


@pytest.mark.parametrize("made", [{}, {"gate_first": False}, {"bias": True}, {"gate_first": False, "bias": True}])
def test_gate_and_value_are_one_product(made, monkeypatch):
    """Also as one kernel computes them, which takes their halves side by side."""
    experts = Experts(Wide(**made), 3).double()
    for param in experts.parameters():
        nn.init.normal_(param)
    (down,) = [each for each in experts._structure._products if each.names == ("down",)]
    (both,) = [each for each in experts._structure._products if each is not down]
    gate = "w1" if made.get("gate_first", True) else "w2"
    assert (both.names[0], both.gate[2]) == (gate, "gelu_tanh")
    layers = [[expert.get_submodule(name).weight for name in both.names] for expert in experts.deepspeed_experts]
    assert merged(layers) is not None
    rows = torch.randn(9, WIDTH, dtype=torch.float64)
    groups = Groups.of(torch.tensor([4, 0, 5]))
    parts = zip(experts.deepspeed_experts, rows.split([4, 0, 5]), strict=True)
    expected = torch.cat([expert(part) for expert, part in parts])
    wanted = torch.autograd.grad(expected.sin().sum(), list(experts.parameters()))
    for by_kernel in (False, True):
        monkeypatch.setattr("deepspeed.moe.experts.takes", lambda _, answer=by_kernel: answer)
        found = experts(rows, groups=groups)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        grads = torch.autograd.grad(found.sin().sum(), list(experts.parameters()))
        torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-5)


def test_a_gate_that_broadcasts_is_no_half():
    class Scalar(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

        def forward(self, rows):
            return nn.functional.silu(self.gate(rows)) * self.up(rows)

    (product,) = read(Scalar())._products
    assert product.gate is None
    experts = Experts(Scalar(), 2)
    rows = torch.randn(4, WIDTH)
    expected = torch.cat([expert(part) for expert, part in zip(experts.deepspeed_experts, rows.split(2), strict=True)])
    torch.testing.assert_close(experts(rows, groups=Groups(2, length=2)), expected)


def test_memory_that_lies_side_by_side_stays_where_it_is():
    rows = [[nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(3))] for _ in range(3)]
    values = [[each.detach().clone() for each in row] for row in rows]
    lay_side_by_side(rows)
    at = [each.data_ptr() for row in rows for each in row]
    lay_side_by_side(rows)
    assert at == [each.data_ptr() for row in rows for each in row]
    assert all(
        torch.equal(one, other) for pair in zip(rows, values, strict=True) for one, other in zip(*pair, strict=True)
    )
    assert stacked([row[1] for row in rows]).data_ptr() == at[1]
    apart = [[nn.Parameter(torch.randn(4, 2))], [nn.Parameter(torch.randn(3, 2))]]
    before = [row[0].data_ptr() for row in apart]
    lay_side_by_side(apart)
    assert before == [row[0].data_ptr() for row in apart], "experts that are not alike are left alone"


@pytest.mark.parametrize("counts", [[3, 0, 2], [0, 0, 0], [1, 1, 1]])
def test_grouped_products(counts):
    groups = Groups.of(torch.tensor(counts))
    rows = torch.randn(sum(counts), 4, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((3, 5, 4), (3, 5)))
    parts = [part @ w.t() + b for part, w, b in zip(rows.split(counts), weight, bias, strict=True)]
    torch.testing.assert_close(grouped_linear(rows, weight, groups, bias), torch.cat(parts))
    assert torch.autograd.gradcheck(
        lambda *given: grouped_linear(given[0], given[1], groups, given[2]), (rows, weight, bias)
    )
    assert groups.sizes() == counts


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("length", [2, 0])
def test_grouped_products_of_equal_groups(length, has_bias):
    groups = Groups(3, length=length)
    rows = torch.randn(3 * length, 4, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((3, 5, 4), (3, 5)))
    added = bias if has_bias else None
    parts = [part @ w.t() for part, w in zip(rows.view(3, length, 4), weight, strict=True)]
    expected = torch.cat([part + b for part, b in zip(parts, bias, strict=True)] if has_bias else parts)
    out = grouped_linear(rows, weight, groups, added)
    torch.testing.assert_close(out, expected)
    (grad,) = torch.autograd.grad(out.sum(), weight)
    assert grad.is_contiguous(), "as the weight lies, so that sums of gradients run along memory"
    given = (rows, weight, bias) if has_bias else (rows, weight)
    assert torch.autograd.gradcheck(
        lambda rows, weight, *bias: grouped_linear(rows, weight, groups, *bias), given, raise_exception=True
    )
    frozen = grouped_linear(rows.detach(), weight.detach(), groups, added)
    assert frozen.requires_grad is has_bias


def test_parameters_of_experts():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 2))
    assert has_moe_layers(model) == (True, 2)
    assert has_moe_layers(nn.Linear(1, 1)) == (False, 0)
    shared, experts = split_params_into_shared_and_expert_params(list(model.parameters()))
    assert (len(shared), len(experts)) == (3, 4)
    assert all(param.group_name == "ep_size_1" and is_moe_param(param) for param in experts)


def test_groups_of_experts():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 4, ep_size=2))
    made = configure_moe_param_groups(list(model.parameters()))
    assert [(group["name"], group.get("moe", False), len(group["params"])) for group in made] == [
        ("dense-params", False, 3),
        ("ep_size_2", True, 4),
    ]
    plain = list(nn.Linear(1, 1).parameters())
    assert configure_moe_param_groups(plain) is plain
    given = {"params": list(model.parameters()), "name": "all", "lr": 0.5}
    made = split_params_into_different_moe_groups_for_optimizer(given, max_group_size=WIDTH * WIDTH)
    assert [(group["name"], group["lr"], len(group["params"])) for group in made] == [
        ("all", 0.5, 3),
        ("ep_size_2", 0.5, 1),
        ("ep_size_2", 0.5, 1),
        ("ep_size_2", 0.5, 1),
        ("ep_size_2", 0.5, 1),
    ]
    first, expert = model[0].weight, model[1].deepspeed_moe.experts.deepspeed_experts[0].weight
    made = configure_moe_param_groups([{"params": first}, {"params": expert}, {"params": iter([model[0].bias])}])
    assert [group["params"] for group in made] == [[first], [model[0].bias], [expert]]
    with pytest.raises(UsageError, match="no 'name'"):
        split_params_into_different_moe_groups_for_optimizer({"params": []})
