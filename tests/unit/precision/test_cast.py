"""Casts of modules and inputs: what changes, what does not, and that models still run."""

import collections
import copy
import logging
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.log import logger
from deepspeed.precision.cast import BufferRule, cast_inputs, cast_module

NARROW = [torch.bfloat16, torch.float16]


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8)), persistent=False)
        self.register_buffer("count", torch.tensor(3))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.rotary = Rotary()
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_parameters_keep_their_identity_ties_and_flags(dtype):
    model = Tied()
    model.head.weight.requires_grad_(False)
    before = dict(model.named_parameters())
    line = cast_module(model, dtype)
    assert {name: id(each) for name, each in model.named_parameters()} == {n: id(p) for n, p in before.items()}
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.dtype == dtype
    assert not model.head.weight.requires_grad
    assert ": 1 parameters and" in line
    assert "parameters keep" not in line


def test_a_second_cast_is_free():
    model = cast_twice = Tied()
    cast_module(model, torch.bfloat16)
    pointers = [each.data_ptr() for each in model.parameters()]
    line = cast_module(cast_twice, torch.bfloat16)
    assert ": 0 parameters and 0 buffers" in line
    assert [each.data_ptr() for each in model.parameters()] == pointers


def test_the_optimizer_that_holds_the_parameters_still_works():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    cast_module(model, torch.bfloat16)
    before = model.weight.detach().clone()
    model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert model.weight.grad.dtype == torch.bfloat16
    assert not torch.equal(model.weight, before)


def test_gradients_and_hooks_follow():
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    seen = []
    model.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.dtype))
    cast_module(model, torch.bfloat16)
    assert model.weight.grad.dtype == torch.bfloat16
    model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((1, 2), 2.0, dtype=torch.bfloat16))
    assert seen == [torch.bfloat16]


def test_integers_booleans_and_quantised_values_are_not_touched():
    model = nn.Module()
    kinds = [torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex64]
    for kind in kinds:
        name = str(kind).removeprefix("torch.")
        model.register_parameter(name, nn.Parameter(torch.zeros(2).to(kind), requires_grad=False))
        model.register_buffer(f"buffer_{name}", torch.zeros(2).to(kind))
    line = cast_module(model, torch.bfloat16, BufferRule(torch.bfloat16))
    assert [each.dtype for each in model.parameters()] == kinds
    assert [each.dtype for each in model.buffers()] == kinds
    assert ": 0 parameters and 0 buffers" in line


def test_rotary_tables_stay_in_fp32():
    model = Tied()
    table = model.rotary.inv_freq
    expected = table.clone()
    line = cast_module(model, torch.bfloat16)
    assert model.rotary.inv_freq is table
    assert torch.equal(table, expected)
    assert table.dtype == torch.float32
    assert line.endswith("1 buffers keep another dtype (rotary.inv_freq)")


def test_buffer_dtype_casts_buffers_in_place():
    model = Tied()
    table = model.rotary.inv_freq
    line = cast_module(model, torch.bfloat16, BufferRule(torch.bfloat16))
    assert model.rotary.inv_freq is table
    assert table.dtype == torch.bfloat16
    assert model.rotary.count.dtype == torch.int64
    assert line.endswith("and 1 buffers")


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ((), torch.bfloat16),
        (("inv_freq",), torch.float32),
        (("rot*freq",), torch.float32),
        (("*",), torch.float32),
        (("head",), torch.bfloat16),
        (("nothing", r"^rotary\."), torch.float32),
    ],
)
def test_keep_in_fp32_by_pattern(keep, expected):
    model = Tied()
    cast_module(model, torch.bfloat16, BufferRule(torch.bfloat16, keep))
    assert model.rotary.inv_freq.dtype == expected
    assert model.head.weight.dtype == torch.bfloat16, "patterns are about buffers"


def test_a_kept_buffer_that_came_in_16_bits_becomes_fp32():
    model = Tied()
    model.rotary.bfloat16()
    cast_module(model, torch.bfloat16, BufferRule(None, ("inv_freq",)))
    assert model.rotary.inv_freq.dtype == torch.float32


def test_a_bad_pattern_names_the_key():
    with pytest.raises(DeepSpeedConfigError, match=r"data_types\.keep_in_fp32_modules: 'a\('") as caught:
        cast_module(Tied(), torch.bfloat16, BufferRule(torch.bfloat16, ("a(",)))
    assert caught.value.path == "data_types.keep_in_fp32_modules"


@pytest.mark.parametrize(
    ("attribute", "dtype", "expected"),
    [
        ("_keep_in_fp32_modules_strict", torch.bfloat16, torch.float32),
        ("_keep_in_fp32_modules_strict", torch.float16, torch.float32),
        ("_keep_in_fp32_modules", torch.bfloat16, torch.bfloat16),
        ("_keep_in_fp32_modules", torch.float16, torch.float32),
    ],
)
def test_auto_asks_the_modules(attribute, dtype, expected):
    model = Tied()
    setattr(model, attribute, ["rotary"])
    cast_module(model, dtype, BufferRule(dtype))
    assert model.rotary.inv_freq.dtype == expected


def test_auto_means_whole_names():
    model = Tied()
    model._keep_in_fp32_modules_strict = ["rot"]
    cast_module(model, torch.bfloat16, BufferRule(torch.bfloat16))
    assert model.rotary.inv_freq.dtype == torch.bfloat16


def train_and_eval(model, inputs):
    for training in (True, False):
        model.train(training)
        model.zero_grad()
        inputs = inputs.detach().requires_grad_()
        outputs = model(inputs)
        assert outputs.dtype == inputs.dtype
        outputs.float().square().sum().backward()
        assert all(each.grad is not None and each.grad.dtype == each.dtype for each in model.parameters())


NORMS = {
    "batch1": (lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), (8, 4)),
    "batch2": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)), (4, 3, 5, 5)),
    "batch_plain": (
        lambda: nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4, affine=False), nn.Conv1d(4, 2, 1)),
        (4, 3, 5),
    ),
    "batch_without_statistics": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 2)),
        (8, 4),
    ),
    "instance": (
        lambda: nn.Sequential(nn.Conv1d(3, 4, 1), nn.InstanceNorm1d(4, affine=True, track_running_stats=True)),
        (4, 3, 5),
    ),
    "layer": (lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2)), (8, 4)),
    "group": (lambda: nn.Sequential(nn.Conv1d(3, 4, 1), nn.GroupNorm(2, 4), nn.Conv1d(4, 2, 1)), (4, 3, 5)),
}


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("buffers", [None, "same", torch.float32], ids=str)
def test_normalisations_run_forward_and_backward(norm, dtype, buffers):
    make, shape = NORMS[norm]
    model = make()
    cast_module(model, dtype, BufferRule(dtype if buffers == "same" else buffers))
    train_and_eval(model, torch.randn(shape).to(dtype))


@pytest.mark.parametrize("loaded", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_normalisations_run_when_the_model_came_in_16_bits(loaded, dtype):
    model = NORMS["batch1"][0]().to(loaded)
    cast_module(model, dtype)
    train_and_eval(model, torch.randn(8, 4).to(dtype))


def test_a_batch_norm_has_one_dtype():
    model = NORMS["batch1"][0]()
    line = cast_module(model, torch.bfloat16)
    assert {each.dtype for each in model[1].parameters()} == {torch.float32}
    assert "2 parameters keep another dtype (1.weight, 1.bias)" in line
    assert "2 buffers keep another dtype (1.running_mean, 1.running_var)" in line
    assert model[0].weight.dtype == torch.bfloat16
    cast_module(model, torch.bfloat16, BufferRule(torch.bfloat16))
    assert {each.dtype for each in model[1].parameters()} == {torch.bfloat16}
    assert model[1].running_var.dtype == torch.bfloat16


def test_half_kept_statistics_do_not_split_a_batch_norm():
    model = NORMS["batch1"][0]()
    cast_module(model, torch.bfloat16, BufferRule(torch.bfloat16, ("running_mean",)))
    assert model[1].running_mean.dtype == model[1].running_var.dtype == model[1].weight.dtype == torch.float32


def test_statistics_follow_small_changes():
    """With statistics in 16 bits and a low momentum this ends at 1.0, where it began."""
    model = nn.Sequential(nn.BatchNorm1d(1, momentum=0.001))
    cast_module(model, torch.bfloat16)
    inputs = torch.randn(64, 1, generator=torch.Generator().manual_seed(0)).mul(1.5).to(torch.bfloat16)
    for _ in range(50):
        model(inputs)
    expected = 1 + (1 - 0.999**50) * (inputs.float().var() - 1)
    torch.testing.assert_close(model[0].running_var, expected.reshape(1), rtol=1e-3, atol=0)


def test_recurrent_layers_run():
    model = nn.LSTM(3, 4, batch_first=True)
    cast_module(model, torch.bfloat16)
    outputs, _ = model(torch.ones(2, 5, 3, dtype=torch.bfloat16))
    outputs.sum().backward()
    assert model.weight_ih_l0.grad.dtype == torch.bfloat16
    assert model._flat_weights[0] is model.weight_ih_l0


@pytest.fixture
def records(caplog):
    logger.addHandler(caplog.handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    yield caplog
    logger.setLevel(level)
    logger.removeHandler(caplog.handler)


def test_what_keeps_another_dtype_is_told(records):
    cast_module(Tied(), torch.bfloat16)
    assert "cast to bf16: 1 parameters and 0 buffers; 1 buffers keep another dtype (rotary.inv_freq)" in records.text


def test_fp32_training_of_a_16_bit_model_warns(records):
    model = nn.Linear(2, 2).half()
    cast_module(model, torch.float32)
    assert model.weight.dtype == torch.float32
    assert "2 parameters in fp16" in records.text
    assert "fp16.enabled" in records.text


def test_fp32_leaves_an_fp32_model_and_all_buffers_alone():
    model = Tied()
    model.rotary.bfloat16()
    line = cast_module(model, torch.float32, BufferRule(torch.float16))
    assert ": 0 parameters and 0 buffers" in line


# ---- inputs ---------------------------------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", ["left", "right"])


class Batch(collections.UserDict):
    """As Hugging Face's BatchEncoding is."""


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    label: str


def test_positional_and_keyword_inputs_are_cast_at_any_depth():
    x, ids = torch.randn(2), torch.arange(3)
    half = x.half()
    frozen = Frozen(x, "a")
    args, kwargs = cast_inputs(
        (x, ids, [x, {"a": x, "n": 1}], Pair(x, None), "text", frozen), {"x": x, "batch": Batch(v=x, i=ids)}, torch.half
    )
    assert torch.equal(args[0], half)
    assert args[1] is ids
    assert torch.equal(args[2][0], half)
    assert torch.equal(args[2][1]["a"], half)
    assert type(args[3]) is Pair
    assert torch.equal(args[3].left, half)
    assert args[4] == "text"
    assert torch.equal(args[5].x, half)
    assert args[5].label == "a"
    assert torch.equal(kwargs["x"], half)
    assert type(kwargs["batch"]) is Batch
    assert torch.equal(kwargs["batch"]["v"], half)
    assert kwargs["batch"]["i"] is ids


def test_the_callers_objects_are_not_changed():
    x = torch.randn(2)
    nested = {"a": [x], "f": Frozen(x, "b")}
    before = copy.copy(nested)
    cast_inputs((nested,), {}, torch.float16)
    assert nested == before
    assert nested["a"][0] is nested["f"].x is x
    assert x.dtype == torch.float32


def test_what_needs_no_cast_is_passed_on():
    half = torch.randn(2).half()
    values = ([half], (half, 1), {"a": half}, Frozen(half, "c"), torch.arange(2), torch.Size([1]), None)
    args, kwargs = cast_inputs(values, {"v": values}, torch.float16)
    assert all(new is old for new, old in zip(args, values, strict=True))
    assert kwargs["v"] is values


def test_gradients_flow_through_the_cast():
    x = torch.ones(2, requires_grad=True)
    (cast,), _ = cast_inputs((x,), {}, torch.float16)
    cast.sum().backward()
    assert torch.equal(x.grad, torch.ones(2))


def test_other_kinds_of_containers():
    packed = nn.utils.rnn.pack_sequence([torch.randn(3), torch.randn(2)])
    sorted_pair = torch.sort(torch.randn(3))
    (new_packed, new_sorted), _ = cast_inputs((packed, sorted_pair), {}, torch.float16)
    assert new_packed.data.dtype == torch.float16
    assert torch.equal(new_packed.batch_sizes, packed.batch_sizes)
    assert type(new_sorted) is type(sorted_pair)
    assert new_sorted.values.dtype == torch.float16
