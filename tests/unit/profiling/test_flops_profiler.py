"""Operations, times and parameters by module."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from deepspeed.accelerator.peaks import peak_flops
from deepspeed.errors import UsageError
from deepspeed.ops.model.linear_loss import linear_loss
from deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile
from deepspeed.profiling.flops_profiler.count import work_of
from deepspeed.profiling.flops_profiler.profiler import wrapFunc
from deepspeed.profiling.flops_profiler.report import Facts, number_to_string, params_to_string, summary


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def chain():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4), nn.Softmax(-1))


def work(function, *inputs):
    return get_model_profile(Call(function), args=list(inputs), print_profile=False, as_string=False)[:2]


X = torch.ones(6, 8)
SEEN = torch.ones(1, 2, 6, 4)

# (function, inputs, operations, multiplications with an addition)
COSTS = {
    "product": (lambda x: x @ x.T, (X,), 576, 288),
    "einsum": (lambda x: torch.einsum("ij,kj->ik", x, x), (X,), 576, 288),
    "batched": (lambda x: torch.bmm(x, x.mT), (torch.ones(3, 6, 8),), 1728, 864),
    "attention": (functional.scaled_dot_product_attention, (SEEN, SEEN, SEEN), 4 * 2 * 36 * 4, 2 * 2 * 36 * 4),
    "convolution": (functional.conv2d, (torch.ones(1, 3, 8, 8), torch.ones(5, 3, 3, 3)), 2 * 36 * 5 * 27, 36 * 5 * 27),
    "activation": (functional.gelu, (X,), 48, 0),
    "softmax": (lambda x: functional.softmax(x, -1), (X,), 48, 0),
    "sum of a product": (lambda x: (x * x).sum(), (X,), 96, 0),
    "norm": (lambda x: functional.layer_norm(x, (8,)), (X,), 192, 0),
    "look-up": (functional.embedding, (torch.zeros(3, dtype=torch.long), X), 0, 0),
    "view": (lambda x: x.t().reshape(-1).clone(), (X,), 0, 0),
    "matrix and vector": (lambda x: x @ x[0], (X,), 96, 48),
    "dot": (lambda x: x[0] @ x[1], (X,), 16, 8),
    "sum of products": (torch.addbmm, (torch.ones(6, 6), torch.ones(3, 6, 8), torch.ones(3, 8, 6)), 1728, 864),
    "product in place": (lambda x: torch.zeros(6, 6).addmm_(x, x.T), (X,), 576, 288),
    "groups of rows": (
        lambda x, w: torch._grouped_mm(x, w, offs=torch.tensor([2, 6], dtype=torch.int32)),
        (X.bfloat16(), torch.ones(2, 8, 16, dtype=torch.bfloat16)),
        2 * 6 * 8 * 16,
        6 * 8 * 16,
    ),
    "LSTM": (nn.LSTM(8, 5, num_layers=2), (X.unsqueeze(1),), 6 * (8 * (65 + 50) + 2 * 13 * 5), 6 * 4 * (65 + 50)),
    "bilinear": (nn.Bilinear(8, 8, 5, bias=False), (X, X), 2 * 6 * 8 * 8 * 5, 6 * 8 * 8 * 5),
    "activation in place": (lambda x: functional.silu(x.clone(), inplace=True), (X,), 48, 0),
    "activation with weight": (nn.PReLU(), (X,), 48, 0),
    "loss": (lambda x: functional.mse_loss(x, torch.zeros(6, 8)), (X,), 48, 0),
    "complex numbers": (lambda x: torch.view_as_complex(x.view(6, 4, 2)) * 2, (X,), 24, 0),
    "pooling of volumes": (nn.AvgPool3d(2), (torch.ones(1, 1, 4, 4, 4),), 64, 0),
    "linear interpolation": (lambda x: functional.interpolate(x[None], scale_factor=2, mode="linear"), (X,), 96, 0),
    "integers": (lambda x: x + 1, (torch.ones(5, dtype=torch.long),), 0, 0),
}


@pytest.mark.parametrize("name", COSTS)
def test_what_an_operation_costs(name):
    function, inputs, flops, macs = COSTS[name]
    assert work(function, *inputs) == (flops, macs)


@pytest.mark.parametrize(("layer", "cell"), [(nn.RNN, 2), (nn.LSTM, 13), (nn.GRU, 10)], ids=["RNN", "LSTM", "GRU"])
def test_a_recurrent_layer_costs_the_same_in_a_library_and_one_by_one(layer, cell):
    """Which of them computes it depends on the processor, on the threads and on gradients."""
    x = torch.ones(6, 2, 8)
    for options in ({"num_layers": 2}, {"bidirectional": True, "bias": False}):
        model, found = layer(8, 5, **options), []
        for enabled in (True, False):
            before = torch._C._get_mkldnn_enabled()
            torch._C._set_mkldnn_enabled(enabled)
            try:
                found.append(work(model, x))
            finally:
                torch._C._set_mkldnn_enabled(before)
        macs = 12 * sum(param.numel() for param in model.parameters() if param.dim() == 2)
        assert found == [(2 * macs + 12 * 2 * cell * 5, macs)] * 2


def test_a_recurrent_layer_of_a_device_costs_the_same():
    x, hx = torch.ones(6, 2, 8), torch.zeros(4, 2, 5)
    model = nn.LSTM(8, 5, num_layers=2, bidirectional=True)
    weights = list(model.parameters())
    rest = (False, 0.0, True, True, [], None)  # batch_first, dropout, train, bidirectional, batch_sizes, dropout_state
    expected = work(model, x)
    assert work_of(torch.ops.aten._cudnn_rnn, (x, weights, 4, None, hx, hx, 2, 5, 0, 2, *rest), {}, None) == expected
    assert work_of(torch.ops.aten.miopen_rnn, (x, weights, 4, hx, hx, 2, 5, 2, *rest), {}, None) == expected


@pytest.mark.parametrize("training", [True, False])
def test_without_gradients_the_work_is_the_same(training):
    convolution = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Upsample(scale_factor=2), nn.Dropout())
    for model, shape in (
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 5, 8)),
        (nn.GRU(4, 5), (6, 2, 4)),
        (convolution, (2, 3, 8, 8)),
    ):
        found = []
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            profiler = FlopsProfiler(model.train(training))
            profiler.start_profile()
            with mode():
                model(torch.ones(shape))
            profiler.stop_profile()
            found.append((profiler.flops, profiler.macs))
            profiler.end_profile()
        assert found == [found[0]] * 3
        assert found[0][1] > 0


# Counted by DeepSpeed 0.19.8 for the same models: get_model_profile(chain(), (3, 8)), and MACs of the encoder.
def test_the_numbers_of_known_models():
    assert get_model_profile(chain(), (3, 8), print_profile=False, as_string=False) == (1452, 576, 244)
    assert get_model_profile(chain(), (3, 8), print_profile=False) == ("1.45 K", "576 MACs", "244")
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    before = torch.backends.mha.get_fastpath_enabled()
    x = torch.ones(2, 5, 8)
    _, macs, _ = get_model_profile(attention, args=[x, x, x], print_profile=False, as_string=False)
    assert macs == 10 * 8 * 24 + 10 * 8 * 8 + 2 * (2 * 2 * 5 * 5 * 4)
    assert torch.backends.mha.get_fastpath_enabled() == before


def test_work_is_told_by_module_and_the_model_is_as_it_was():
    model, profiler = chain(), None
    kept = [set(module.__dict__) for module in model.modules()]
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    with pytest.raises(UsageError, match="is running"):
        profiler.start_profile()
    for _ in range(2):
        model(torch.ones(3, 8))
    profiler.stop_profile()
    model(torch.ones(3, 8))
    assert [profiler.profile.flops(child) for child in model] == [2 * 768, 2 * 48, 2 * 240, 2 * 384, 2 * 12]
    assert profiler.get_total_macs() == profiler.macs == 2 * 576
    assert profiler.get_total_params(as_string=True) == "244"
    assert profiler.get_total_duration() >= profiler.profile.duration(model[0]) > 0
    profiler.end_profile()
    assert [set(module.__dict__) for module in model.modules()] == kept
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert profiler.get_total_flops() == 0
    assert (profiler.flops, profiler.params) == (2 * 1452, 244)


def test_a_model_that_fails_leaves_nothing_behind():
    model = nn.Sequential(nn.Linear(4, 4), Call(lambda x: x @ torch.ones(5, 5)))
    with pytest.raises(RuntimeError, match="mat1"):
        get_model_profile(model, (2, 4), warm_up=0)
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
    assert get_model_profile(model[0], (2, 4), print_profile=False, as_string=False) == (64, 32, 20)


def test_every_module_is_in_the_mode_that_it_was_in():
    model = chain()
    model[2].eval()
    get_model_profile(model, (3, 8), print_profile=False)
    assert [module.training for module in model.modules()] == [True, True, True, False, True, True]


class Twice(nn.Module):
    """Calls one child two times, and itself once."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, x, again=True):
        return self(self.inner(self.inner(x)), again=False) if again else x


def test_a_module_that_is_called_more_than_once():
    model = Twice()
    assert get_model_profile(model, (2, 4), print_profile=False, as_string=False) == (128, 64, 16)


def test_profiles_at_the_same_time_count_apart():
    model = chain()
    whole, part = FlopsProfiler(model), FlopsProfiler(model[0])
    whole.start_profile()
    part.start_profile()
    model(torch.ones(3, 8))
    assert whole.profile.macs(model[0]) == part.profile.macs(model[0]) == 384
    part.stop_profile()
    whole.stop_profile()
    assert (whole.flops, whole.macs, part.macs) == (1452, 576, 384)
    part.end_profile()
    assert (whole.get_total_macs(), part.get_total_macs()) == (576, 0)
    whole.end_profile()


def test_profiles_may_end_in_the_order_of_their_beginning():
    fast = torch.backends.mha.get_fastpath_enabled()
    one, two = FlopsProfiler(chain()), FlopsProfiler(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval())
    one.start_profile()
    two.start_profile()
    one.end_profile()
    with torch.no_grad():
        two.model(torch.ones(2, 5, 8))
    two.stop_profile()
    assert two.macs == 10 * 8 * 32 + 2 * (2 * 2 * 5 * 5 * 4) + 2 * 10 * 8 * 16
    two.end_profile()
    assert torch.backends.mha.get_fastpath_enabled() == fast
    assert not _get_current_dispatch_mode_stack()


def test_ignored_modules_count_for_what_calls_them():
    model = chain()
    profiler = FlopsProfiler(model)
    profiler.start_profile(ignore_list=[nn.Linear])
    model(torch.ones(3, 8))
    profiler.stop_profile()
    assert profiler.profile.flops(model[0]) == 0
    assert profiler.get_total_flops() == 1452
    profiler.end_profile()


def test_gradients_that_a_forward_computes_ahead_are_not_its_work():
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    labels = torch.tensor([0, 1, 2, 3, 4, -100])

    class Fused(nn.Module):
        def forward(self):
            return linear_loss(hidden, weight, None, labels)

    model = Fused()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model()
    profiler.stop_profile()
    assert profiler.get_total_macs() == 6 * 4 * 5, "one product, not those of its gradients"
    with torch.profiler.record_function("something else"):
        model()
    profiler.end_profile()


def test_a_function_of_ones_own_tells_its_work():
    mine = wrapFunc(lambda x: x.clone(), lambda x: (10 * x.numel(), 5 * x.numel()))
    assert work(mine, X) == (480, 240)
    assert torch.equal(mine(X), X)


def test_the_report(capsys, tmp_path):
    get_model_profile(chain(), (3, 8), top_modules=2)
    shown = capsys.readouterr().out
    for part in (
        "fwd MACs per GPU:                                                       576 MACs",
        "    MACs        - {'Linear': '576 MACs', 'ReLU': '0 MACs'}",
        "(0): Linear(144 = 59.02% Params, 384 MACs = 66.67% MACs, ",
        "in_features=8, out_features=16, bias=True)",
    ):
        assert part in shown
    target = tmp_path / "deep" / "profile.txt"
    get_model_profile(chain(), (3, 8), detailed=False, module_depth=0, output_file=str(target))
    assert capsys.readouterr().out == ""
    text = target.read_text()
    assert "depth 0" in text
    assert "depth 1" not in text
    assert "Detailed" not in text


def test_a_whole_step_is_counted_with_its_micro_steps(capsys):
    model = nn.Linear(500, 1000, bias=False)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.ones(1000, 500))  # 1 GFLOP
    profiler.stop_profile()
    phases = {"fwd": 2.0, "bwd": 4.0, "step": 2.0}
    facts = Facts(world=8, data_parallel=8, batch=1, samples=16, micro_steps=2, recompute=1.0, phases=phases, peak=1e9)
    lines = {line.partition(":")[0]: line.partition(":")[2].strip() for line in summary(profiler.profile, facts, 3)}
    assert lines["fwd latency"] == "1 s"
    assert lines["bwd FLOPS per GPU = 3 * fwd flops per GPU / bwd latency"] == "1.5 GFLOPS"
    assert lines["iter latency = 2 * (fwd+bwd latency) + step latency"] == "8 s"
    assert lines["FLOPS per GPU = 2 * 4 * fwd flops per GPU / iter latency"] == "1 GFLOPS"
    assert lines["MFU = 2 * 3 * fwd flops per GPU / iter latency / 1 GFLOPS"] == "75.0%"
    assert lines["samples/second"] == "2"
    profiler.end_profile()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "found none of them"),
        ({"input_shape": (1,), "args": [1]}, "found both"),
        ({"input_shape": ()}, "expected sizes"),
        ({"input_shape": 3}, "expected sizes"),
        ({"input_shape": (-1, 8)}, "expected sizes"),
        ({"input_shape": ("a", 8)}, "expected sizes"),
        ({"input_shape": (2, 8), "mode": "train"}, "'train'"),
        ({"input_shape": (2, 8), "mode": "generate"}, "Sequential has no method generate"),
        ({"args": torch.ones(2, 8)}, "args is a Tensor"),
        ({"kwargs": [1]}, "kwargs a list"),
        ({"input_shape": (2, 8), "ignore_modules": ["Linear"]}, "'Linear' is no type of module"),
        ({"input_shape": (2, 8), "module_depth": -2}, "module_depth is -2"),
        ({"input_shape": (2, 8), "top_modules": 0}, "top_modules 0"),
    ],
)
def test_what_cannot_be_profiled(options, message):
    with pytest.raises(UsageError, match=message):
        get_model_profile(chain(), **options)


def test_nothing_to_print():
    with pytest.raises(UsageError, match="nothing was profiled"):
        FlopsProfiler(chain()).print_model_profile()
    with pytest.raises(UsageError, match="nothing was profiled"):
        FlopsProfiler(chain()).print_model_aggregated_profile()


def test_generate():
    class Model(nn.Linear):
        def generate(self, x, times):
            for _ in range(times):
                x = self(x)
            return x

    model = Model(4, 4, bias=False)
    found = get_model_profile(model, args=[torch.ones(2, 4), 3], print_profile=False, as_string=False, mode="generate")
    assert found == (3 * 64, 3 * 32, 16)


def test_numbers_as_text():
    assert [number_to_string(n) for n in (0, 5e-7, 0.5, 1, 999, 1e3, 1.5e9, 3e15)] == [
        "0 ", "0.5 u", "500 m", "1 ", "999 ", "1 K", "1.5 G", "3000 T",
    ]  # fmt: skip
    assert [number_to_string(1234567, "FLOPS"), number_to_string(0.012, "s")] == ["1.23 MFLOPS", "12 ms"]
    assert (params_to_string(1.5e9), params_to_string(7)) == ("1.5 B", "7")


def test_peaks_of_devices():
    assert peak_flops("NVIDIA H200") == 989.4e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA L4") == 121e12
    assert peak_flops("something else") is None
