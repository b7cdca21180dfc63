"""What becomes of layers, planned in one process: by rules, presets, names; and what cannot be split."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from deepspeed.config.parallel import TPTrainingConfig
from deepspeed.errors import UsageError
from deepspeed.tensor_parallel import plan_model
from deepspeed.tensor_parallel.layer_splits import check_products
from deepspeed.tensor_parallel.plan import require_split
from deepspeed.tensor_parallel.rules import SplitKind


class Attention(nn.Module):
    def __init__(self, heads=4, key_heads=2, dim=4):
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = heads, key_heads, dim
        self.q_proj = nn.Linear(16, heads * dim)
        self.k_proj = nn.Linear(16, key_heads * dim)
        self.v_proj = nn.Linear(16, key_heads * dim)
        self.o_proj = nn.Linear(heads * dim, 16)


class Block(nn.Module):
    def __init__(self, inner=24, **heads):
        super().__init__()
        self.self_attn = Attention(**heads)
        self.mlp = nn.ModuleDict({"gate_up_proj": nn.Linear(16, 2 * inner), "down_proj": nn.Linear(inner, 16)})


class Model(nn.Module):
    def __init__(self, **sizes):
        super().__init__()
        self.layers = nn.ModuleList([Block(**sizes)])
        self.embed, self.lm_head = nn.Embedding(10, 16), nn.Linear(16, 10, bias=False)


def planned(model, ranks=2, **section):
    made = plan_model(TPTrainingConfig(autotp_size=ranks, **section), model, ranks)
    return {change.path: change for change in made.changes}


def test_names_tell_what_is_split():
    changes = planned(Model())
    attention = "layers.0.self_attn."
    kinds = {path: change.kind for path, change in changes.items()}
    assert [kinds[f"{attention}{name}"] for name in ("q_proj", "k_proj", "v_proj", "o_proj")] == [
        *[SplitKind.COLUMN] * 3,
        SplitKind.ROW,
    ]
    fused = changes["layers.0.mlp.gate_up_proj"].splits
    assert fused["weight"].parts == (((0, 12), (24, 36)), ((12, 24), (36, 48)))
    assert fused["bias"] == fused["weight"]
    down = changes["layers.0.mlp.down_proj"].splits
    assert down["weight"].dim == 1
    assert "bias" not in down, "it is added once"
    assert "lm_head" not in kinds


def test_ranks_hold_the_keys_they_need():
    """Some hold copies where keys are fewer than ranks; in a fused weight they stay whole."""
    keys = planned(Model(key_heads=2), 4)["layers.0.self_attn.k_proj"]
    assert keys.rows is None
    assert keys.splits["weight"].parts == (((0, 4),), ((0, 4),), ((4, 8),), ((4, 8),))
    assert keys.splits["bias"] == keys.splits["weight"]
    assert keys.splits["weight"].shared
    assert not planned(Model(key_heads=2))["layers.0.self_attn.k_proj"].splits["weight"].shared
    model = Model(key_heads=1)
    attention = model.layers[0].self_attn
    attention.qkv_proj = nn.Linear(16, 24)
    del attention.q_proj, attention.k_proj, attention.v_proj
    attention.hidden_size = 16
    fused = planned(model)["layers.0.self_attn.qkv_proj"]
    assert fused.splits == {}
    assert fused.rows == (((0, 8), (16, 20), (20, 24)), ((8, 16), (16, 20), (20, 24)))


def test_the_output_of_shared_keys_is_not_gathered():
    own = [{"patterns": [r".*k_proj\.weight"], "partition_type": "column", "gather_output": True}]
    with pytest.raises(UsageError, match=r"k_proj is to be gathered, but its 1 key-value heads \(dim 0\)"):
        planned(Model(key_heads=1), partition_config={"layer_specs": own})


def test_heads_are_never_cut():
    changes = planned(Model(heads=3, key_heads=3, inner=24))
    assert changes["layers.0.self_attn.q_proj"].splits["weight"].parts == (((0, 8),), ((8, 12),))
    assert changes["layers.0.self_attn.o_proj"].splits["weight"].parts == (((0, 8),), ((8, 12),))
    with pytest.raises(UsageError, match=r"layers\.0\.self_attn\.q_proj has 3 query heads \(dim 0"):
        planned(Model(heads=3, key_heads=3), 4)


def test_own_rules_come_first_and_the_first_wins():
    own = [
        {"patterns": [r".*\.self_attn\..*"], "partition_type": "skip"},
        {"patterns": [r".*[qkv]_proj\.weight"], "partition_type": "column"},
    ]
    changes = planned(Model(), partition_config={"layer_specs": own})
    assert changes["layers.0.self_attn.q_proj"].kind is SplitKind.WHOLE
    assert "layers.0.mlp.down_proj" not in changes, "rules that are there are all there are"
    both = planned(Model(), partition_config={"layer_specs": own}, preset_model="phi3")
    assert both["layers.0.mlp.down_proj"].kind is SplitKind.ROW
    alone = planned(Model(), partition_config={"layer_specs": own, "use_default_specs": False}, preset_model="phi3")
    assert alone.keys() < both.keys()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"shape": [5, -1]}, r"gate_up_proj has 48 outputs.*makes 45"),
        ({"shape": [[40, 7], -1]}, r"gate_up_proj has 48 outputs.*makes 47"),
        ({"shape": [[45, 3], -1]}, r"gate_up_proj has 48 outputs.*of which 45"),
        ({"shape": [2, -1], "gather_output": True}, r"gate_up_proj is to be split in 2 fused parts"),
    ],
)
def test_a_rule_that_does_not_fit(rule, message):
    rules = [{"patterns": [r".*gate_up_proj\.weight"], "partition_type": "column", **rule}]
    with pytest.raises(UsageError, match=message):
        planned(Model(), partition_config={"layer_specs": rules})


def test_vocabulary():
    changes = planned(Model(), vocab_parallel_lm_head=True)
    assert changes["lm_head"].splits["weight"].parts == (((0, 5),), ((5, 10),))
    assert "embed" not in changes
    tied = Model()
    tied.lm_head.weight = tied.embed.weight
    changes = planned(tied, vocab_parallel_lm_head=True)
    assert changes["embed"].kind is SplitKind.VOCABULARY
    assert changes["embed"].splits["weight"] == changes["lm_head"].splits["weight"]
    del tied.lm_head
    with pytest.raises(UsageError, match="vocab_parallel_lm_head is true, but the model has no Linear"):
        planned(tied, vocab_parallel_lm_head=True)


def test_an_embedding_that_is_tied_to_nothing():
    model = Model()
    with pytest.raises(
        UsageError, match=r"vocab_parallel_embedding is true, but Model has no get_input_embeddings\(\)"
    ):
        planned(model, vocab_parallel_embedding=True)
    model.get_input_embeddings = lambda: model.embed
    changes = planned(model, vocab_parallel_embedding=True)
    assert changes["embed"].kind is SplitKind.VOCABULARY
    assert changes["embed"].splits["weight"].parts == (((0, 5),), ((5, 10),))
    model.lm_head.weight = model.embed.weight
    for head in (False, None):
        with pytest.raises(UsageError, match=r"embed is tied to lm_head, which stays whole. Set .*lm_head to true"):
            planned(model, vocab_parallel_embedding=True, vocab_parallel_lm_head=head)
    assert (
        planned(model, vocab_parallel_embedding=True, vocab_parallel_lm_head=True)["embed"].kind is SplitKind.VOCABULARY
    )


def test_a_layer_of_another_kind():
    model = Model()
    model.layers[0].mlp["down_proj"] = nn.Conv1d(24, 16, 1)
    with pytest.raises(UsageError, match=r"layers\.0\.mlp\.down_proj is a Conv1d"):
        planned(model)


class Unnamed(nn.Module):
    """Layers whose names tell nothing."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"alpha": nn.Linear(8, 12), "beta": nn.Linear(12, 8)})])


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Unnamed()


PLAN = {"layers.*.alpha": "colwise", "layers.*.beta": "rowwise"}


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("where", ["instance", "class", "config"])
def test_the_plan_of_a_plain_module(where, around, monkeypatch):
    model = Around() if around else Unnamed()
    inner = model.inner if around else model
    if where == "config":
        model.config = SimpleNamespace(base_model_tp_plan=PLAN)
    elif where == "class":
        monkeypatch.setattr(Unnamed, "_tp_plan", PLAN, raising=False)
    else:
        inner._tp_plan = PLAN
    kinds = {path.rsplit(".", 1)[-1]: change.kind for path, change in planned(model).items()}
    assert kinds == {"alpha": SplitKind.COLUMN, "beta": SplitKind.ROW}


def test_a_plan_that_fits_no_block_leaves_the_names():
    model = Model()
    model.config = SimpleNamespace(base_model_tp_plan={"blocks.*.alpha": "colwise"})
    assert planned(model)["layers.0.mlp.down_proj"].kind is SplitKind.ROW


def rules(**kinds):
    return [{"patterns": [rf".*\.{name}\.weight"], "partition_type": kind} for name, kind in kinds.items()]


def test_rules_by_which_nothing_is_split():
    section = {"layer_specs": [{"patterns": [".*"], "partition_type": "skip"}], "strict_mode": True}
    made = plan_model(TPTrainingConfig(autotp_size=2, partition_config=section), Model(), 2)
    assert {change.kind for change in made.changes} == {SplitKind.WHOLE}
    require_split(made, "Model")
    section = {"layer_specs": rules(nothing="column")}
    made = plan_model(TPTrainingConfig(autotp_size=2, partition_config=section), Model(), 2)
    with pytest.raises(UsageError, match=r"none of the 1 rules of .*partition_config matches a layer of Model"):
        require_split(made, "Model")


def test_a_rule_that_skips_the_rest_is_enough_for_strict_mode():
    rest = {"patterns": [".*"], "partition_type": "skip"}
    given = [{"patterns": [r".*\.gate_up_proj"], "shape": [2, -1]}, *rules(down_proj="row")]
    changes = planned(Model(), partition_config={"layer_specs": [*given, rest], "strict_mode": True})
    assert changes["layers.0.mlp.down_proj"].kind is SplitKind.ROW
    with pytest.raises(UsageError, match="strict_mode: no rule matches 6 layers"):
        planned(Model(), partition_config={"layer_specs": given, "strict_mode": True})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"alpha": "column"}, "splits layers.0.alpha by its outputs (dim 0 of its weight), but no layer behind it"),
        ({"beta": "row"}, "splits layers.0.beta by its inputs (dim 1 of its weight), but no layer before it"),
        ({"q_proj": "column", "o_proj": "row"}, "not the outputs (dim 0) of layers.0.self_attn.k_proj"),
        ({"[qk]_proj": "column", "o_proj": "row"}, "not the outputs (dim 0) of layers.0.self_attn.v_proj"),
        ({"gate_proj": "column", "down_proj": "row"}, "rules split mlp.gate_proj by its outputs (dim 0 of its weight)"),
    ],
)
def test_rules_that_name_half_of_a_pair(given, message):
    model = Unnamed() if given.keys() & {"alpha", "beta"} else Model()
    if "gate_proj" in given:
        model.mlp = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("gate_proj", "up_proj", "down_proj")})
    with pytest.raises(UsageError, match=re.escape(message)):
        planned(model, partition_config={"layer_specs": rules(**given)})
    if "alpha" in given:
        given = [{**rule, "gather_output": True} for rule in rules(**given)]
        assert planned(model, partition_config={"layer_specs": given})


class Experts(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.config = SimpleNamespace(_experts_implementation="grouped_mm")
        self.gate_up_proj = nn.Parameter(torch.zeros(2, 2 * inner, 8))
        self.down_proj = nn.Parameter(torch.zeros(2, 8, inner))


@pytest.mark.parametrize(
    ("inner", "widths", "fits"),
    [(48, [24, 24], "both"), (24, [16, 8], "both"), (20, [12, 8], "32 bits"), (10, [5, 5], "none")],
)
def test_experts_are_cut_as_grouped_products_take_them(inner, widths, fits):
    model = nn.ModuleDict({"experts": Experts(inner)})
    change = planned(model, partition_config={"layer_specs": rules_of_experts()})["experts"]
    assert [change.splits["down_proj"].size(rank) for rank in range(2)] == widths
    assert [change.splits["gate_up_proj"].size(rank) for rank in range(2)] == [2 * width for width in widths]
    for size, fitting in ((None, ("both", "32 bits")), (2, ("both",))):
        if fits in fitting:
            check_products([change], size)
        else:
            with pytest.raises(UsageError, match=rf"inner width {inner} \(dim 2 of down_proj\), of which the"):
                check_products([change], size)
    model.experts.config._experts_implementation = "eager"
    check_products([change], 2)


def rules_of_experts():
    return [{"patterns": [r"experts\.weight"], "partition_type": "column"}]
