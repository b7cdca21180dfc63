"""Linear layers with a bias and the GELU behind them: where they are found, and that they compute the same."""

import copy
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.nn import functional

from deepspeed.fusion.build import find, find_products, put
from deepspeed.transformers.replacement import Refused, Swap

WIDTH, INNER = 16, 32


def plain_mlp(form="none"):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(approximate=form), nn.Linear(INNER, WIDTH))


def fates(model, *exclude):
    return {each.name: each.result for each in find(model, ("mlp",), exclude)}


def same(model, x):
    """The model beside a copy with what was found in place: results and gradients."""
    other = copy.deepcopy(model)
    with ExitStack() as undo:
        put(list(find(model, ("mlp",))), undo)
        results = [each(x) for each in (model, other)]
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
        for result in results:
            result.square().sum().backward()
        for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-5, msg=name)
    assert torch.equal(model(x), other(x)), "everything was taken back"


@pytest.mark.parametrize("form", ["none", "tanh"])
def test_plain_rows_of_modules(form):
    model = nn.Sequential(plain_mlp(form), plain_mlp(form))
    assert {name: each.kernel for name, each in fates(model).items()} == dict.fromkeys(
        ("0.0", "1.0"), "bias and gelu" if form == "none" else "bias and gelu_tanh"
    )
    assert list(fates(model, "0")) == ["1.0"]
    same(model, torch.randn(2, 3, WIDTH))


def test_bert_and_its_head():
    from transformers import BertConfig, BertForMaskedLM

    numbers = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(**numbers, vocab_size=31)).eval()
    found = fates(model)
    assert [name for name, each in found.items() if isinstance(each, Swap)] == [
        "bert.encoder.layer.0.intermediate.dense",
        "bert.encoder.layer.1.intermediate.dense",
        "cls.predictions.transform.dense",
    ]
    ids = torch.arange(12).view(2, 6)
    expected = model(input_ids=ids).logits
    with ExitStack() as undo:
        put(list(find(model, ("mlp",))), undo)
        torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)


class Uses(nn.Module):
    """Reads what the layer computes in more ways than one, or in another order."""

    def __init__(self, way):
        super().__init__()
        self.way, self.layer, self.act, self.out = way, nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)

    def forward(self, x):
        if self.way == "twice":
            inner = self.layer(x)
            return self.out(self.act(inner) + inner)
        if self.way == "later":
            return self.out(self.act(functional.layer_norm(self.layer(x), (8,))))
        if self.way == "again":
            return self.out(self.act(self.act(self.layer(x))))
        return self.out(self.act(self.layer(x)))


def test_what_is_left_alone_has_a_reason():
    for way in ("twice", "later", "again"):
        (fate,) = fates(Uses(way)).values()
        assert isinstance(fate, Refused), way
        assert "no layer of Uses could be seen" in fate.reason
    assert isinstance(fates(Uses("once"))["layer"], Swap)
    without = nn.Sequential(nn.Linear(8, 8, bias=False), nn.GELU())
    assert "has no bias" in fates(without)["0"].reason
    other = nn.Sequential(nn.LayerNorm(8), nn.GELU())
    assert "is a LayerNorm, not a plain linear layer" in fates(other)["0"].reason
    shared = plain_mlp()
    assert "several places" in fates(nn.ModuleList([shared, nn.Sequential(nn.Linear(8, 8), shared[1])]))["0.0"].reason
    hooked = plain_mlp()
    hooked[0].register_forward_hook(lambda module, args, out: None)
    assert "a hook looks" in fates(hooked)["0"].reason
    replaced = plain_mlp()
    replaced[1].forward = lambda x: x
    assert fates(nn.Sequential(nn.GELU(), nn.Linear(8, 8), nn.ReLU())).keys() == {"0"}
    assert fates(nn.Sequential(nn.GELU())) == {}
    assert fates(replaced) == {} or all(isinstance(fate, Refused) for fate in fates(replaced).values())


class Picks(nn.Module):
    """Calls parts of a row on their own."""

    def __init__(self):
        super().__init__()
        self.row = plain_mlp()

    def forward(self, x):
        inner = self.row[0](x)
        return self.row(x) + self.row[2](torch.relu(inner)) + self.row[2](self.row[1](inner))


def test_parts_that_are_called_alone_compute_their_own():
    assert isinstance(fates(Picks())["row.0"], Swap)
    same(Picks(), torch.randn(2, 3, WIDTH))


def test_two_in_a_row():
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(2) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
    assert [type(fate) for fate in fates(model).values()] == [Swap, Swap]
    same(model, torch.randn(2, 3, WIDTH))


def hook_the_layer(model):
    model[0].register_forward_hook(lambda module, args, out: out * 2)


def hook_the_gelu(model):
    model[1].register_forward_pre_hook(lambda module, args: args[0] * 2)


def exchange_the_gelu(model):
    model[1] = nn.ReLU()


def wrap_the_layer(model):
    inner = model[0]
    model[0] = nn.Sequential(inner, nn.LayerNorm(INNER))


def compile_the_layer(model):
    model[0].compile(backend="eager")


@pytest.mark.parametrize(
    "change", [hook_the_layer, hook_the_gelu, exchange_the_gelu, wrap_the_layer, compile_the_layer]
)
def test_parts_that_changed_meanwhile_compute_their_own(change):
    model, x = plain_mlp(), torch.randn(3, WIDTH)
    plain = copy.deepcopy(model)
    put(list(find(model, ("mlp",))), ExitStack())
    for each in (model, plain):
        change(each)
    torch.testing.assert_close(model(x), plain(x))


class Dropped(nn.Module):
    """Numbers are dropped before the activation, or behind it."""

    def __init__(self, behind):
        super().__init__()
        self.layer, self.act, self.drop, self.behind = nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.5), behind

    def forward(self, x):
        x = self.layer(x)
        return self.drop(self.act(x)) if self.behind else self.act(self.drop(x))


@pytest.mark.parametrize("training", [True, False])
def test_dropout_between_the_two_is_seen_in_evaluation_as_well(training):
    assert isinstance(fates(Dropped(behind=True).train(training))["layer"], Swap)
    (fate,) = fates(Dropped(behind=False).train(training)).values()
    assert isinstance(fate, Refused)


def test_lora_around_the_layer_is_left_alone_and_around_the_next_one_is_not():
    peft = pytest.importorskip("peft")
    for target, kind in (("0", Refused), ("2", Swap)):
        model = nn.Sequential(plain_mlp())
        tuned = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[f"0.{target}"]))
        (fate,) = fates(tuned).values()
        assert isinstance(fate, kind), fate
    names = [name for name, param in tuned.named_parameters() if param.requires_grad]
    assert names
    other, x = copy.deepcopy(tuned), torch.randn(3, WIDTH)
    with ExitStack() as undo:
        put(list(find(tuned, ("mlp",))), undo)
        torch.testing.assert_close(tuned(x), other(x), rtol=1e-5, atol=1e-6)


def test_a_compiler_sees_the_activation_once():
    model = plain_mlp("tanh")
    x = torch.randn(3, WIDTH)
    expected = model(x)
    with ExitStack() as undo:
        put(list(find(model, ("mlp",))), undo)
        torch.testing.assert_close(torch.compile(model, backend="eager")(x), expected)
        first = torch.compile(model[0], backend="eager")  # one of the two alone
        torch.testing.assert_close(model[2](model[1](first(x))), expected)


def test_products_of_8_bits_go_below_it():
    model, x = plain_mlp("tanh"), torch.randn(16, WIDTH)
    exact = model(x)
    with ExitStack() as undo:
        put(list(find_products(model, "tensor")), undo)
        rounded = model(x)
    with ExitStack() as undo:
        put(list(find(model, ("mlp",))), undo)
        products = list(find_products(model, "tensor"))
        assert all(isinstance(each.result, Swap) for each in products)
        put(products, undo)
        found = model(x)
        torch.testing.assert_close(found, rounded, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(found, exact, rtol=1e-4, atol=1e-5)
    assert torch.equal(model(x), exact)
