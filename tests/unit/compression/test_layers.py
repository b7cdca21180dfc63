"""Compressed layers: what they compute, what `redundancy_clean` makes of them, and what is refused."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from deepspeed.compression.basic_layer import LinearLayer_Compress, QuantAct, compression_of
from deepspeed.compression.compress import init_compression, redundancy_clean
from deepspeed.compression.helper import (
    convert_conv1d_to_linear,
    recursive_getattr,
    recursive_setattr,
    student_initialization,
)
from deepspeed.compression.layer_state import BitPace, WeightRounding
from deepspeed.compression.plan import plans_of, section_of
from deepspeed.compression.scheduler import compression_scheduler
from deepspeed.compression.utils import TopKBinarizer
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.ops.quantizer.quantizer import in_steps, round_groups
from tests.covering import pairs


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(12, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.conv, self.norm, self.conv2 = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)
        for name in ("running_mean", "weight", "bias"):
            nn.init.normal_(getattr(self.norm, name))

    def forward(self, tokens, image):
        hidden = self.down(torch.relu(self.up(self.tokens(tokens))))
        return hidden, self.conv2(torch.relu(self.norm(self.conv(image))))


class Attention(nn.Module):
    def __init__(self, heads=4, width=16):
        super().__init__()
        torch.manual_seed(0)
        self.num_heads = heads
        for name in ("query", "key", "value", "dense"):
            setattr(self, name, nn.Linear(width, width))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        return self.dense(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


INPUTS = torch.randint(12, (4, 5), generator=torch.Generator().manual_seed(1)), torch.randn(2, 3, 9, 9)


def technique(modules, params, related=None, **shared):
    group = {"params": params, "modules": modules} | ({} if related is None else {"related_modules": related})
    return {
        "shared_parameters": {"enabled": True, "schedule_offset": 0, **shared},
        "different_groups": {"one": group},
    }


def config(**techniques):
    return {"train_batch_size": 1, "compression_training": techniques}


def compressed(model, settings):
    init_compression(model, settings)
    compression_scheduler(model, settings["compression_training"])
    return model.eval()


CHOICES = {
    "bits": [8, 4, 2, 1],
    "quantization_type": ["symmetric", "asymmetric"],
    "quantize_groups": [1, 4, 8],
    "store_integers": [False, True],
    "row": ["l1", "topk"],
}


@pytest.mark.parametrize("row", pairs(*CHOICES.values()), ids=str)
def test_a_cleaned_model_computes_what_the_masked_one_did(row):
    row = dict(zip(CHOICES, row, strict=True))
    bits, method, stores = row.pop("bits"), row.pop("row"), row["store_integers"]
    if bits <= 2:
        row["quantization_type"] = "symmetric"
    if stores:
        row["quantize_groups"] = min(row["quantize_groups"], 4)
    settings = config(
        weight_quantization=technique(["*"], {"start_bits": bits, "target_bits": bits}, **row),
        row_pruning=technique(["up"], {"dense_ratio": 0.5}, [["down"]], method=method),
        channel_pruning=technique(["conv$"], {"dense_ratio": 0.75}, [["norm", "conv2"]], method=method),
        sparse_pruning=technique(["down", "conv2"], {"dense_ratio": 1.0 if bits == 1 and stores else 0.3}),
    )
    model = compressed(Net(), settings)
    assert compression_of(model.up).weights_on
    expected = model(*INPUTS)
    redundancy_clean(model, settings)
    for found, before in zip(model(*INPUTS), expected, strict=True):
        torch.testing.assert_close(found, before, rtol=0, atol=1e-6)
    assert (model.up.out_features, model.down.in_features, model.conv.out_channels, model.norm.num_features) == (
        8,
        8,
        6,
        6,
    )
    assert not [name for name in model.state_dict() if "mask" in name]
    assert not [module for module in model.modules() if module._forward_hooks or module._forward_pre_hooks]
    if stores:
        assert "up.weight" not in model.state_dict()
        again = redundancy_clean(compressed(Net(), settings), settings)
        again.load_state_dict(model.state_dict())
        assert torch.equal(again(*INPUTS)[0], model(*INPUTS)[0])
        assert again.half().up.weight.dtype is torch.float16
        assert again.up.weight_scale.dtype is torch.float32
    else:
        assert type(model.up) is nn.Linear
        assert model.up.weight.unique().numel() <= 2**bits * row["quantize_groups"]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        return self.head(self.tokens(tokens))


@pytest.mark.parametrize("stores", [False, True])
@pytest.mark.parametrize("modules", [["*"], ["tokens"]], ids=str)
def test_layers_that_share_a_weight_compute_what_they_did(modules, stores, caplog):
    settings = config(
        weight_quantization=technique(modules, {"start_bits": 4, "target_bits": 4}, store_integers=stores),
    )
    model = compressed(Tied(), settings)
    expected = model(INPUTS[0])
    redundancy_clean(model, settings)
    torch.testing.assert_close(model(INPUTS[0]), expected, rtol=0, atol=1e-6)
    alike = modules == ["*"]
    if stores and alike:
        assert model.head.weight_codes is model.tokens.weight_codes
    else:
        assert (model.head.weight is model.tokens.weight) is alike
    assert ("tokens and head shared a weight" in caplog.text) is not alike


def test_integers_take_the_bytes_that_their_bits_say():
    def size(bits):
        model = nn.Sequential(nn.Linear(256, 256, bias=False))
        settings = config(
            weight_quantization=technique(["*"], {"start_bits": bits, "target_bits": bits}, store_integers=True)
        )
        redundancy_clean(compressed(model, settings), settings)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        codes = model[0].weight_codes
        if bits == 8:  # as plain torch reads it
            widened = (codes.view(256, 256).float() - model[0].weight_zero) * model[0].weight_scale
            torch.testing.assert_close(widened, model[0].weight)
        return codes.nbytes, len(file.getvalue())

    for bits in (8, 4, 2, 1):
        codes, file = size(bits)
        assert codes == 256 * 256 * bits // 8
        assert file < codes + 8 * 256 + 4096


def test_sparsity_is_that_of_the_ratio_to_the_element():
    for ratio, kept in ((0.29, 29), (0.7, 70), (0.999, 99), (1.0, 100)):
        model = nn.Sequential(nn.Linear(10, 10))
        settings = config(sparse_pruning=technique(["*"], {"dense_ratio": ratio}))
        largest = model[0].weight.detach().abs().flatten().sort(descending=True).values
        redundancy_clean(compressed(model, settings), settings)
        assert int((model[0].weight != 0).sum()) == kept
        assert model[0].weight.abs().sum().item() == pytest.approx(largest[:kept].sum().item())


def snip(**shared):
    settings = {"enabled": True, "method": "snip_momentum", **shared}
    return {"sparse_pruning": {"shared_parameters": settings}}


@pytest.mark.parametrize("pattern", ["4x1", "2x2", "1x1"])
def test_blocks_go_by_how_much_the_loss_depends_on_them(pattern):
    """As the formula says, written without blocks of views: momentum of |weight * gradient|, summed in blocks."""
    high, wide = map(int, pattern.split("x"))
    settings = config(
        **snip(
            schedule_offset=2,
            schedule_offset_end=5,
            schedule_offset_stride=2,
            block_pattern=pattern,
            dense_ratio=0.3,
            excluded_modules=["2"],
        )
    )
    torch.manual_seed(0)
    model = init_compression(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), settings)
    schedule = compression_scheduler(model, settings["compression_training"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    count = 48 // (high * wide)
    scores, alive, kept = torch.zeros(8 // high, 6 // wide), torch.ones(8 // high, 6 // wide, dtype=torch.bool), []
    for step in range(7):
        loss = model(torch.randn(16, 6)).square().mean()
        if step in (4, 5):  # after 2, where everything stays, every second step, and at the end
            left = 0.3 if step == 5 else 0.3 + 0.7 / 27
            order = scores.masked_fill(~alive, -1).flatten().argsort(descending=True)
            alive = torch.zeros(count, dtype=torch.bool).index_fill_(0, order[: int(left * count)], True).view_as(alive)
        kept.append(int(model[0].effective()[0].ne(0).sum()))
        assert torch.equal(model[0].effective()[0] != 0, alive.kron(torch.ones(high, wide)).bool())
        optimizer.zero_grad()
        loss.backward()
        if step < 5:
            product = (model[0].weight * model[0].weight.grad).abs().detach()
            for row in range(8 // high):
                for column in range(6 // wide):
                    block = product[row * high : (row + 1) * high, column * wide : (column + 1) * wide]
                    scores[row, column] = 0.9 * scores[row, column] + block.sum()
        schedule.before_step()
        optimizer.step()
        schedule.step()
    assert kept[:4] == [48] * 4
    assert kept[5:] == [int(0.3 * count) * high * wide] * 2
    assert compression_of(model[2]) is None
    x = torch.randn(3, 6)
    expected = model(x)
    redundancy_clean(model, settings)
    assert torch.equal(model(x), expected)
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert int((model[0].weight != 0).sum()) == kept[-1]


def test_blocks_do_not_go_unseen():
    settings = config(**snip(schedule_offset=1, dense_ratio=0.5))
    model = init_compression(nn.Sequential(nn.Linear(4, 4)), settings)
    with pytest.raises(UsageError, match=r"no gradient of 0 was seen before step 1. Call before_step"):
        compression_scheduler(model, settings["compression_training"]).step()
    for shared, said in (
        (
            {"block_pattern": "3x1"},
            r"block_pattern is 3x1, which does not divide the weight 16x8 of up;.*excluded_mod",
        ),
        ({"excluded_modules": ["conf"]}, "excluded_modules: 'conf' finds no module.* Near names: conv"),
        ({"excluded_modules": ["."]}, r"all modules.modules: .* finds up, .*excluded_modules .* keeps all of them"),
        ({"dense_ratio": 0.01, "excluded_modules": ["conv"]}, "dense_ratio 0.01 of up keeps none of 32"),
    ):
        with pytest.raises(UsageError, match=said):
            init_compression(Net(), config(**snip(**shared)))
    section = section_of(config(**snip(excluded_modules=["."])))
    assert not next(plans_of(Net(), section, None, partly=True)).names, "a stage of a pipeline may have none of them"
    groups = {"one": {"modules": ["up"]}, "two": {"modules": ["down"], "params": {"dense_ratio": 0.5}}}
    settings = snip(dense_ratio=0.25)
    settings["sparse_pruning"]["different_groups"] = groups
    model = init_compression(Net(), config(**settings))
    ratios = [compression_of(layer).prunings["sparse_pruning"].ratio for layer in (model.up, model.down)]
    assert ratios == [0.25, 0.5]


@pytest.mark.parametrize("method", ["l1", "topk"])
def test_heads_are_taken_out_of_an_attention(method):
    settings = config(
        head_pruning=technique(["dense"], {"dense_ratio": 0.5}, [["query", "key", "value"]], method=method, num_heads=4)
    )
    model = compressed(Attention(), settings)
    inputs = torch.randn(2, 3, 16)
    expected = model(inputs)
    assert not torch.allclose(expected, Attention()(inputs))
    redundancy_clean(model, settings)
    assert (model.num_heads, model.query.out_features, model.dense.in_features) == (2, 8, 8)
    torch.testing.assert_close(model(inputs), expected, rtol=0, atol=1e-6)


def test_techniques_begin_at_their_steps_and_a_copy_is_independent():
    settings = config(
        row_pruning=technique(["up"], {"dense_ratio": 0.5}, schedule_offset=2),
        activation_quantization=technique(["down"], {"bits": 4}, schedule_offset=1),
    )
    plain = Net().eval()
    model = init_compression(Net(), settings).eval()
    scheduler = compression_scheduler(model, settings["compression_training"])
    other = copy.deepcopy(model)
    outputs = [plain(*INPUTS)[0]]
    for _ in range(3):
        outputs.append(model(*INPUTS)[0])
        scheduler.step()
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[1], outputs[2])
    assert not torch.equal(outputs[2], outputs[3])
    assert torch.equal(other(*INPUTS)[0], outputs[0])
    assert set(dict(model.named_parameters())) == set(dict(plain.named_parameters()))


def test_a_weight_loses_bits_in_periods_that_double():
    pace = BitPace.of(WeightRounding(8, 4, period=10, change_ratio=0.1))
    bits = []
    for step in range(100):
        pace.advance(step)
        bits.append(pace.bits)
    assert [bits.index(each) for each in (8, 7, 6, 5, 4)] == [0, 10, 20, 40, 80]
    assert pace.unrounded(85) == pytest.approx(0.5)
    jumped = BitPace.of(WeightRounding(8, 4, period=10))
    jumped.advance(41)
    assert (jumped.bits, jumped.since) == (5, 40)
    jumped.advance(19)
    assert (jumped.bits, jumped.since) == (7, 10)


def test_numbers_round_by_their_formulas():
    x = torch.tensor([[-1.0, 0.3, 0.5, 2.0]])
    assert torch.equal(round_groups(x, 4).values, (x / 0.25).round().clamp(-8, 7) * 0.25)
    low = round(-1 / 0.1875) * 0.1875
    torch.testing.assert_close(
        round_groups(x, 4, asym=True).values, ((x - low) / 0.1875).round().clamp(0, 15) * 0.1875 + low
    )
    torch.testing.assert_close(round_groups(x, 1).values, torch.tensor([[-0.95, 0.95, 0.95, 0.95]]))
    torch.testing.assert_close(round_groups(x, 2).values, torch.tensor([[-1.5, 0.0, 0.0, 1.5]]))
    ranged = in_steps(x, 8, (torch.tensor([[-4.0]]), torch.tensor([[1.0]]))).values
    assert torch.equal(ranged, (x / (8 / 256)).round() * (8 / 256))


def test_the_largest_elements_are_chosen():
    assert TopKBinarizer.apply(torch.tensor([1.0, 3.0, 3.0, 2.0]), 0.5, False).tolist() == [0, 1, 1, 0]


def test_static_ranges_are_moving_means_of_training():
    act = QuantAct(quant_mode="asymmetric")
    act(torch.tensor([-1.0, 3.0]), 8)
    act(torch.tensor([0.0, 5.0]), 8)
    torch.testing.assert_close(act.x_min_max, torch.tensor([-0.95, 3.1]))
    before = act.x_min_max.clone()
    assert float(act.eval()(torch.tensor([100.0]), 8)) < 3.2
    assert torch.equal(act.x_min_max, before)


def test_a_layer_is_compressed_by_hand():
    layer = LinearLayer_Compress(4, 4)
    layer.enable_weight_quantization(8, 2, 1, True, "symmetric", 4)
    compression_scheduler(layer, {"weight_quantization": {"shared_parameters": {"schedule_offset": 0}}}).enter(1000)
    layer(torch.randn(2, 4)).sum().backward()
    assert layer.weight.grad is not None
    rounded, _ = layer.effective()
    assert all(row.unique().numel() <= 3 for row in rounded)
    assert isinstance(layer.weight, nn.Parameter)


@pytest.mark.parametrize("calibration", ["dynamic", "static"])
def test_no_tokens_come_out_as_none(calibration):
    layer = LinearLayer_Compress(4, 3)
    layer.enable_activation_quantization(8, range_calibration=calibration)
    layer.compressed.activations.on = True
    assert layer(torch.randn(0, 4)).shape == (0, 3)


def test_students_begin_as_layers_of_their_teacher():
    def model(layers):
        return nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(layers)), "head": nn.Linear(4, 2)})

    teacher, student = model(4), model(2)
    reduction = {
        "enabled": True,
        "module_name_prefix": "layers",
        "teacher_layer": [1, 3],
        "other_module_name": ["head"],
    }
    settings = config(layer_reduction=reduction)
    with pytest.raises(DeepSpeedConfigError, match="without teacher_model"):
        init_compression(student, settings)
    init_compression(student, settings, teacher)
    for mine, theirs in (("layers.0", "layers.1"), ("layers.1", "layers.3"), ("head", "head")):
        assert torch.equal(recursive_getattr(student, mine).weight, recursive_getattr(teacher, theirs).weight)
    for change, said in (
        ({"teacher_layer": [1, 4]}, "teacher_layer: the teacher has no module 'layers.4'; layers has 0, 3"),
        ({"teacher_layer": [1]}, "lists 1 layers, and the student has 2 at layers"),
        ({"other_module_name": ["haed"]}, "the student has no module 'haed'; near names: head"),
    ):
        with pytest.raises(UsageError, match=said):
            student_initialization(student, teacher, config(layer_reduction={**reduction, **change}))


def test_transposed_layers_become_linear_ones():
    class Conv1D(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(5))

        def forward(self, x):
            return x @ self.weight + self.bias

    model = nn.Sequential(Conv1D(), nn.ReLU())
    x = torch.randn(2, 3)
    expected = model(x)
    with pytest.raises(UsageError, match=r"finds no module.*\(Conv1D\).*convert_conv1d_to_linear first"):
        init_compression(model, config(row_pruning=technique(["0"], {"dense_ratio": 0.5})))
    assert isinstance(convert_conv1d_to_linear(model, Conv1D)[0], nn.Linear)
    torch.testing.assert_close(model(x), expected)
    recursive_setattr(model, "0.bias", None)
    assert model[0].bias is None


@pytest.mark.parametrize(
    ("techniques", "said"),
    [
        (
            {"row_pruning": technique(["upp"], {"dense_ratio": 0.5})},
            r"one.modules: 'upp' finds no module.*Near names: up",
        ),
        ({"row_pruning": technique(["up", "u"], {"dense_ratio": 0.5})}, r"'u' of the group 'one' finds up, which an"),
        ({"row_pruning": technique(["up"], {"dense_ratio": 0.01})}, "dense_ratio 0.01 of up keeps none of 16"),
        (
            {"weight_quantization": technique(["up"], {"start_bits": 8, "target_bits": 8}, quantize_groups=7)},
            "quantize_groups is 7, which does not divide the 128 elements of up.weight",
        ),
        (
            {
                "weight_quantization": technique(
                    ["up"], {"start_bits": 8, "target_bits": 8}, quantize_groups=32, store_integers=True
                ),
                "row_pruning": technique(["up"], {"dense_ratio": 0.5}),
                "head_pruning": technique(["down"], {"dense_ratio": 0.5}, num_heads=3),
            },
            "num_heads is 3, which does not divide the 16 inputs of down",
        ),
        (
            {"row_pruning": technique(["up"], {"dense_ratio": 0.5}, [["down|up"]])},
            r"related_modules: 'down\|up' finds 2 modules \(up, down\), and the pattern that they belong to 1",
        ),
        (
            {"channel_pruning": technique(["conv$"], {"dense_ratio": 0.5}, [["down"]])},
            "related_modules: 'down' finds down, a Linear, which cannot get smaller with channel_pruning; leave it out",
        ),
    ],
)
def test_what_a_model_does_not_allow_is_refused(techniques, said):
    with pytest.raises(UsageError, match=said):
        init_compression(Net(), config(**techniques))


def test_a_model_that_was_not_compressed_is_not_cleaned():
    settings = config(row_pruning=technique(["up"], {"dense_ratio": 0.5}))
    with pytest.raises(UsageError, match="up is not compressed"):
        redundancy_clean(Net(), settings)
