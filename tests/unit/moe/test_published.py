"""The parts of AutoEP that DeepSpeed publishes: what each computes, beside plain torch and Transformers' modules."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from deepspeed.moe.ep_count import count_tokens_per_expert
from deepspeed.moe.ep_experts import (
    GroupedExperts,
    apply_expert_activation,
    apply_packed_expert_activation,
    get_expert_activation,
    register_expert_activation,
)
from deepspeed.moe.ep_repack import (
    repack_expert_requires_grad_flags,
    repack_expert_source_params,
    repack_expert_weights,
)
from deepspeed.moe.ep_router import TokenChoiceTopKRouter
from deepspeed.moe.ep_tp_dispatch import assignment_ordinals_by_expert
from deepspeed.moe.fused_expert_layout import classify_fused_gate_up_layout
from torch import nn
from torch.nn import functional

from deepspeed.errors import UsageError
from deepspeed.moe import ep_kernels


def test_counts_of_choices_of_any_shape():
    found = count_tokens_per_expert(torch.tensor([[2, 0], [2, 3]], dtype=torch.int32), 5)
    assert found.tolist() == [1, 0, 2, 1, 0]
    assert count_tokens_per_expert(torch.zeros(0, 2, dtype=torch.int64), 2).tolist() == [0, 0]
    assert assignment_ordinals_by_expert(torch.tensor([2, 0, 2, 2, 0])).tolist() == [0, 0, 1, 2, 1]


def test_the_layout_of_fused_weights_is_told_by_their_shapes():
    straight = classify_fused_gate_up_layout((4, 12, 8), (4, 8, 6))
    assert (straight.hidden_size, straight.ffn_hidden_size, straight.needs_transpose) == (8, 6, False)
    turned = classify_fused_gate_up_layout((4, 8, 12), (4, 6, 8))
    assert (turned.hidden_size, turned.ffn_hidden_size, turned.needs_transpose) == (8, 6, True)
    for first, second in (((4, 12, 8), (4, 6, 8)), ((4, 12, 8), (3, 8, 6)), ((12, 8), (8, 6)), ((4, 6, 8), (4, 8, 6))):
        assert classify_fused_gate_up_layout(first, second) is None, f"{first} and {second} are no such weights"


# Indices


def runs(counts, experts, ranks, align):
    """Places of rows [rank][expert], by a loop: the permutation, and the rows of each expert."""
    starts = torch.tensor(counts).cumsum(0).tolist()
    places, sizes = [], []
    for expert in range(experts):
        mine = []
        for rank in range(ranks):
            end = starts[rank * experts + expert]
            mine += range(end - counts[rank * experts + expert], end)
        size = max(-(-len(mine) // align) * align, align)
        places += mine + [-1] * (size - len(mine))
        sizes.append(size)
    return places, sizes


@pytest.mark.parametrize("counts", [[3, 0, 2, 1, 4, 0], [0, 0, 0, 0, 0, 0], [5, 5, 5, 1, 0, 8]])
@pytest.mark.parametrize("align", [1, 4])
def test_rows_of_every_expert_come_together(counts, align):
    expected, sizes = runs(counts, 3, 2, align)
    for on_host in (False, True):
        found = ep_kernels.generate_permute_indices(torch.tensor(counts), 3, 2, len(expected) + 3, align, on_host)
        assert found[0].tolist() == [*expected, -1, -1, -1]
        assert found[1].tolist() == sizes
        assert found[2].tolist() == torch.tensor(sizes).cumsum(0).tolist()
    with pytest.raises(UsageError, match=f"need {len(expected)} places"):
        ep_kernels.generate_permute_indices(torch.tensor(counts), 3, 2, len(expected) - 1, align)
    with pytest.raises(UsageError, match="2 ranks with 4 experts each need 8"):
        ep_kernels.generate_permute_indices(torch.tensor(counts), 4, 2, 99, align)


def test_indices_are_filled_where_experts_are_told_to_lie():
    counts, starts = torch.tensor([2, 1, 0, 3]), torch.tensor([0, 2, 3, 3])
    found = ep_kernels.fill_indices_wrapper(counts, starts, torch.tensor([5, 0]), 2, 2, 8)
    assert found.tolist() == [2, 3, 4, 5, -1, 0, 1, -1]


def test_rows_are_moved_and_come_back_with_their_gradients():
    rows = torch.randn(5, 3, requires_grad=True)
    places = torch.tensor([3, -1, 0, 4, -1, 1], dtype=torch.int32)  # row 2 has none
    moved = ep_kernels.permute_rows(rows, places)
    expected = torch.stack([rows[place] if place >= 0 else torch.zeros(3) for place in places.tolist()])
    torch.testing.assert_close(moved, expected)
    back = ep_kernels.unpermute_rows(moved * 2, places, 5)
    weights = torch.randn(5, 3)
    (back * weights).sum().backward()
    kept = torch.tensor([1.0, 1, 0, 1, 1]).unsqueeze(1)
    torch.testing.assert_close(back, 2 * rows * kept)
    torch.testing.assert_close(rows.grad, 2 * weights * kept)
    assert ep_kernels.inverse_permutation(places, 5).tolist() == [2, 5, -1, 0, 3]
    assert not ep_kernels.permute_rows_supported(rows.detach().double()), "kernels take 16 and 32 bits"
    again = torch.tensor([1, 1, -1])
    gathered = ep_kernels.gather_rows(rows, again)
    assert torch.equal(gathered[2], torch.zeros(3))
    (slope,) = torch.autograd.grad(gathered.sum(), rows)
    assert slope[:, 0].tolist() == [0, 2, 0, 0, 0]
    assert ep_kernels.gather_rows(rows[:0], torch.tensor([-1])).tolist() == [[0, 0, 0]]


def test_a_function_of_experts_is_given_whole_multiples_of_rows():
    torch.manual_seed(0)
    experts = GroupedExperts(4, 6, 2)
    seen = []

    def compute(w1, w2, w3, rows, counts):
        seen.append(counts.tolist())
        return experts(rows, counts)

    x = torch.randn(9, 4, requires_grad=True)
    counts = torch.tensor([3, 1, 0, 5])  # of two ranks
    found = ep_kernels.indices_padding_wrapper(compute)(experts.w1, experts.w2, experts.w3, x, counts)
    expected = one_by_one(experts, x, [0, 0, 0, 1, 1, 1, 1, 1, 1])
    torch.testing.assert_close(found, expected)
    assert seen == [[8, 8]]
    torch.testing.assert_close(*(torch.autograd.grad(each.square().sum(), x)[0] for each in (found, expected)))


# Experts


def one_by_one(experts, x, numbers, act=lambda gate, up: functional.silu(gate) * up):
    rows = []
    for row, number in zip(x, numbers, strict=True):
        inner = act(experts.w1[number] @ row, experts.w3[number] @ row)
        rows.append(experts.w2[number] @ inner)
    return torch.stack(rows)


@pytest.mark.parametrize("options", [{}, {"gate_up_impl": "fused"}, {"use_grouped_mm": False}], ids=str)
def test_grouped_experts_compute_each_row_by_its_expert(options):
    torch.manual_seed(0)
    experts = GroupedExperts(4, 6, 3, **options)
    x = torch.randn(7, 4)
    found = experts(x, torch.tensor([2, 0, 3]))  # two rows behind the last
    expected = one_by_one(experts, x[:5], [0, 0, 2, 2, 2])
    torch.testing.assert_close(found[:5], expected)
    assert torch.equal(found[5:], torch.zeros(2, 4))
    params = list(experts.parameters())
    slopes = [torch.autograd.grad(each.square().sum(), params) for each in (found, expected)]
    torch.testing.assert_close(*slopes)
    with pytest.raises(UsageError, match="has 2 numbers, but there are 3 experts"):
        experts(x, torch.tensor([2, 5]))


def test_activations_are_those_of_their_names_packed_or_not():
    gate, up = torch.randn(2, 5, 6) * 6
    glu = {
        "swiglu": functional.silu(gate) * up,
        "geglu_tanh": functional.gelu(gate, approximate="tanh") * up,
        "swiglu_clamped": functional.silu(gate.clamp(max=2.0)) * up.clamp(-2.0, 2.0),
        "swiglu_oai": (up.clamp(-2.0, 2.0) + 1) * gate.clamp(max=2.0) * torch.sigmoid(1.5 * gate.clamp(max=2.0)),
    }
    for name, expected in glu.items():
        for fused in (True, False):
            found = apply_expert_activation(gate, up, name, 1.5, 2.0, fused)
            torch.testing.assert_close(found, expected, msg=name)
            packed = apply_packed_expert_activation(torch.cat((gate, up), -1), name, 1.5, 2.0, fused)
            torch.testing.assert_close(packed, expected, msg=name)
    with pytest.raises(UsageError, match="no activation of experts is called 'relu'"):
        get_expert_activation("relu")
    with pytest.raises(UsageError, match="'swiglu' is known already"):
        register_expert_activation("swiglu", lambda gate, up, alpha, limit: gate)


def test_an_activation_of_ones_own():
    from deepspeed.moe import ep_experts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ep_experts, "_activations", dict(ep_experts._activations))
        register_expert_activation("scaled", lambda gate, up, alpha, limit: alpha * gate + up, uses_alpha=True)
        assert get_expert_activation("scaled").uses_alpha
        experts = GroupedExperts(4, 6, 2, activation="scaled", activation_alpha=3.0)
        x = torch.randn(3, 4)
        expected = one_by_one(experts, x, [0, 1, 1], lambda gate, up: 3 * gate + up)
        torch.testing.assert_close(experts(x, torch.tensor([1, 2])), expected)


def spec_of(w1, w2, w3, experts=4, hidden=8):
    return SimpleNamespace(
        expert_w1_name=w1, expert_w2_name=w2, expert_w3_name=w3, num_experts=experts, hidden_size=hidden
    )


def listed_experts():
    made = nn.ModuleList(nn.ModuleDict({"w1": nn.Linear(8, 6), "w2": nn.Linear(6, 8)}) for _ in range(4))
    for each in made:
        each["w3"] = nn.Linear(8, 6)
    for each in made:  # as attributes, as models have them
        each.w1, each.w2, each.w3 = each["w1"], each["w2"], each["w3"]
    return made


def test_experts_of_a_list_become_stacked():
    source, spec = listed_experts(), spec_of("w1", "w2", "w3")
    w1, w2, w3 = repack_expert_weights(source, spec, 1, 2)
    assert torch.equal(w1, torch.stack([source[2].w1.weight, source[3].w1.weight]))
    assert torch.equal(w2[1], source[3].w2.weight)
    assert torch.equal(w3[0], source[2].w3.weight)
    assert repack_expert_source_params(source, spec, 1, 2)[0] == [source[2].w1.weight, source[3].w1.weight]
    for each in source:
        each.w2.weight.requires_grad_(False)
    assert repack_expert_requires_grad_flags(source, spec, 0, 2) == (True, False, True)
    source[3].w3.weight.requires_grad_(False)
    assert repack_expert_requires_grad_flags(source, spec, 0, 2) == (True, False, True), "experts of another rank"
    with pytest.raises(UsageError, match=r"w3 of experts \[1\] of this rank's 2 is frozen"):
        repack_expert_requires_grad_flags(source, spec, 1, 2)
    with pytest.raises(UsageError, match="has no weight 'gate'"):
        repack_expert_weights(source, spec_of("gate", "w2", "w3"), 0, 2)
    with pytest.raises(UsageError, match="4 experts, ep_size 3"):
        repack_expert_weights(source, spec, 0, 3)
    with pytest.raises(UsageError, match="a list of 4 experts, but the spec says that there are 8"):
        repack_expert_weights(source, spec_of("w1", "w2", "w3", experts=8), 0, 2)


@pytest.mark.parametrize("turned", [False, True])
def test_separate_stacked_weights_either_way_round(turned):
    source = nn.Module()
    shapes = {"w1": (4, 6, 8), "w2": (4, 8, 6), "w3": (4, 6, 8)}
    for name, (experts, rows, columns) in shapes.items():
        setattr(
            source, name, nn.Parameter(torch.randn((experts, columns, rows) if turned else (experts, rows, columns)))
        )
    found = repack_expert_weights(source, spec_of("w1", "w2", "w3"), 0, 2)
    for name, weight in zip(shapes, found, strict=True):
        whole = getattr(source, name)[:2]
        assert torch.equal(weight, whole.transpose(1, 2) if turned else whole), name
        assert weight.is_contiguous()


# Beside Transformers


def test_repacked_weights_of_transformers_compute_the_same():
    hf = pytest.importorskip("transformers")
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 6, "num_local_experts": 4}
    spec = spec_of("gate_up_proj", "down_proj", None)
    for source, act in (
        (MixtralExperts(hf.MixtralConfig(**sizes)), "swiglu"),
        (GptOssExperts(hf.GptOssConfig(**sizes)), "swiglu_oai"),
    ):
        with torch.no_grad():
            for name, param in source.named_parameters():
                param.copy_(torch.zeros(param.shape) if "bias" in name else torch.randn(param.shape))
        tokens = torch.randn(5, 8)
        ordered = torch.tensor([0, 0, 1, 3, 3])
        expected = source(tokens, ordered.unsqueeze(1), torch.ones(5, 1))
        experts = GroupedExperts(8, 6, 4, activation=act)
        parts = [repack_expert_weights(source, spec, rank, 2) for rank in range(2)]
        with torch.no_grad():
            for param, *halves in zip((experts.w1, experts.w2, experts.w3), *parts, strict=True):
                param.copy_(torch.cat(halves))
        found = experts(tokens, count_tokens_per_expert(ordered, 4))
        torch.testing.assert_close(found, expected, msg=type(source).__name__)
        assert repack_expert_source_params(source, spec, 0, 2)[2] == [source.gate_up_proj]
        with pytest.raises(UsageError, match="these are no gate and up in one, and down, of hidden size 7"):
            repack_expert_weights(source, spec_of("gate_up_proj", "down_proj", None, hidden=7), 0, 2)


def test_routers_choose_as_those_of_transformers_do():
    hf = pytest.importorskip("transformers")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    torch.manual_seed(0)
    config = hf.DeepseekV3Config(
        hidden_size=8, n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=3, routed_scaling_factor=2.5,
    )  # fmt: skip
    gate = DeepseekV3TopkRouter(config)
    bias = torch.randn(8)
    gate.e_score_correction_bias.copy_(bias)
    router = TokenChoiceTopKRouter(8, 8, 4, 2, 3, "sigmoid", True, 2.5, False)
    with torch.no_grad():
        router.gate.weight.copy_(nn.init.normal_(gate.weight))
    tokens = torch.randn(6, 8)
    _, weights, chosen = gate(tokens)
    scores, experts, counts = router(tokens, bias)
    table, expected = torch.zeros(2, 6, 8)
    table.scatter_(1, experts, scores.detach())
    expected.scatter_(1, chosen, weights.detach())
    torch.testing.assert_close(table, expected)
    assert torch.equal(counts, (expected > 0).sum(0))


def test_routers_without_groups_and_what_they_refuse():
    torch.manual_seed(0)
    router = TokenChoiceTopKRouter(4, 6, None, None, 2, "softmax", False, 1.0, True)
    tokens = torch.randn(5, 4)
    scores, experts, counts = router(tokens)
    best = functional.linear(tokens, router.gate.weight, router.gate.bias).softmax(-1).topk(2)
    torch.testing.assert_close(scores.sort(descending=True).values, best.values)
    assert torch.equal(experts.sort().values, best.indices.sort().values)
    assert int(counts.sum()) == 10
    grouped = TokenChoiceTopKRouter(4, 6, 3, 1, 2, "softmax", True, 1.0, False, group_score_func="max")
    scores, experts, _ = grouped(tokens)
    assert torch.equal(experts.sort().values // 2, (grouped.gate(tokens).argmax(-1) // 2).unsqueeze(1).expand(5, 2))
    torch.testing.assert_close(scores.sum(-1), torch.ones(5))
    for arguments, why in (
        ((4, 6, 4, 1, 2, "softmax", True, 1.0, False), "6 experts do not form 4 equal groups"),
        ((4, 6, 3, None, 2, "softmax", True, 1.0, False), "give both, or neither"),
        ((4, 6, 3, 1, 3, "softmax", True, 1.0, False), "top_k is 3, but a token can go to 1 to 2"),
        ((4, 6, None, None, 2, "tanh", True, 1.0, False), "score_func is 'tanh'"),
        ((4, 6, 6, 2, 2, "softmax", True, 1.0, False), "has no two best ones"),
    ):
        with pytest.raises(UsageError, match=why):
            TokenChoiceTopKRouter(*arguments)
