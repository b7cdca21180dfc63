"""Few rows times large weights, and times packed ones: kernels beside their references, and what packing loses."""

import pytest
import torch

from tests.covering import pairs
from tests.unit.generate.families import tiny
from tests.unit.ops.model.interpreted import DEVICE, numbers

from deepspeed.errors import UsageError  # isort: skip
from deepspeed.fusion import experts as fused_experts
from deepspeed.fusion.experts import find_experts
from deepspeed.ops.generate.experts import (
    choose_reference,
    choose_triton,
    routed_experts_reference,
    routed_experts_triton,
)
from deepspeed.ops.generate.kernels import packed as packed_kernels
from deepspeed.ops.generate.kernels import streaming as kernels
from deepspeed.ops.generate.packed import (
    FEW_ROWS,
    MODES,
    pack,
    packed_linear,
    packed_linear_reference,
    packed_linear_triton,
    unpack,
)
from deepspeed.ops.generate.streaming import (
    streamed_gated,
    streamed_gated_reference,
    streamed_gated_triton,
    streamed_linear,
    streamed_linear_reference,
    streamed_linear_triton,
)
from deepspeed.transformers.replacement import Refused

HALF = torch.float16  # the interpreter multiplies no bfloat16


def close(found, expected, tolerance=4e-3):
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


@torch.no_grad()
@pytest.mark.parametrize(
    ("rows", "inner", "units", "biased"), pairs((1, 5, 17, 64), (128, 400, 1040), (1, 7), (False, True))
)
def test_streamed_linear(monkeypatch, rows, inner, units, biased):
    monkeypatch.setattr(kernels, "processors", lambda _device: units)
    x, outs = numbers(rows, inner, dtype=HALF) * inner**-0.5, (70, 64, 130, 8)
    weights = [numbers(out, inner, dtype=HALF) for out in outs]
    biases = [numbers(out, dtype=HALF, seed=2) if biased and out != 64 else None for out in outs]
    for found, expected in zip(
        streamed_linear_triton(x, weights, biases), streamed_linear_reference(x, weights, biases), strict=True
    ):
        close(found, expected)
    assert not kernels.counters(x.device).any(), "counters are as they were"


@torch.no_grad()
@pytest.mark.parametrize(("rows", "kind", "units"), [(1, "silu", 1), (5, "gelu_tanh", 7), (33, "gelu", 3)])
def test_streamed_gated(monkeypatch, rows, kind, units):
    monkeypatch.setattr(kernels, "processors", lambda _device: units)
    x = numbers(2, rows, 400, dtype=HALF)[:, :, :] * 0.05
    gate, up = (numbers(70, 400, dtype=HALF, seed=seed) for seed in (0, 1))
    for biases in (None, [numbers(70, dtype=HALF), None]):
        found = streamed_gated_triton(x, gate, up, kind, biases)
        close(found, streamed_gated_reference(x, gate, up, kind, biases))


@torch.no_grad()
@pytest.mark.parametrize(
    ("tokens", "each", "experts", "kind"),
    [(1, 3, 5, "silu"), (19, 2, 3, "gelu"), (6, 3, 20, "silu")],
)
def test_routed_experts(tokens, each, experts, kind):
    """One token; several blocks of an expert; experts without tokens."""
    x, width, inner = numbers(tokens, 144, dtype=HALF) * 0.1, 144, 48
    gate_up, down = numbers(experts, 2 * inner, width, dtype=HALF), numbers(experts, width, inner, dtype=HALF, seed=1)
    chosen = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(0)).topk(each).indices.to(DEVICE)
    shares = torch.softmax(numbers(tokens, each, seed=2), -1).to(HALF)
    expected = routed_experts_reference(x, gate_up, down, chosen, shares, kind)
    close(routed_experts_triton(x, gate_up, down, chosen, shares, kind), expected, 2e-2)


@torch.no_grad()
@pytest.mark.parametrize(
    ("mode", "symmetric", "group"),
    [("w8a16", True, 0), ("w8a16", False, 128), ("w4a16", True, 128), ("w4a16", False, 0), ("wf6af16", True, 0),
     ("fp8", True, 0)],
)  # fmt: skip
@pytest.mark.parametrize(("tokens", "each", "experts"), [(1, 3, 5), (19, 2, 3), (70, 1, 5)])
def test_packed_experts(mode, symmetric, group, tokens, each, experts):
    """Beside products with widened weights: one token, several blocks of an expert, more than a launch takes."""
    x, width, inner = numbers(tokens, 144, dtype=HALF) * 0.1, 144, 48
    shapes = (experts, 2 * inner, width), (experts, width, inner)
    packed = [pack(numbers(*shape, seed=at).flatten(0, 1), mode, group, symmetric) for at, shape in enumerate(shapes)]
    wide = [unpack(each, HALF).view(shape) for each, shape in zip(packed, shapes, strict=True)]
    chosen = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(0)).topk(each).indices.to(DEVICE)
    shares = torch.softmax(numbers(tokens, each, seed=2), -1).to(HALF)
    expected = routed_experts_reference(x, *wide, chosen, shares, "silu")
    close(routed_experts_reference(x, *packed, chosen, shares, "silu"), expected)
    close(routed_experts_triton(x, *packed, chosen, shares, "silu"), expected, 2e-2)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_experts_of_a_model(monkeypatch, kind):
    """Few tokens take the kernel, more the model's own way, and experts that compute in another way are left."""
    launched = []
    monkeypatch.setattr(fused_experts, "op", lambda _name: routed_experts_triton)
    monkeypatch.setattr(
        fused_experts, "routed_experts", lambda *given: launched.append(1) or routed_experts_triton(*given)
    )
    model = tiny(kind, num_hidden_layers=1).half().to(DEVICE)
    found = [each for each in find_experts(model) if each[0].endswith("experts")]
    assert [isinstance(swap, Refused) for _, _, swap in found] == [kind == "gpt_oss"]
    _, experts, swap = found[0]
    if isinstance(swap, Refused):
        return
    chosen = torch.tensor([[0, 2], [3, 0]], device=DEVICE).repeat(40, 1)
    inputs = [(numbers(80, 32, dtype=HALF)[:few] * 0.1, chosen[:few], chosen[:few] / 4) for few in (1, 5, 80)]
    before = [experts(*given) for given in inputs]
    undo = swap.put()
    for given, expected in zip(inputs, before, strict=True):
        close(experts(*given), expected)
    assert len(launched) == 2
    undo()
    assert torch.equal(experts(*inputs[1]), before[1])


@torch.no_grad()
@pytest.mark.parametrize(("tokens", "experts", "count"), [(1, 5, 1), (7, 130, 8)])
@pytest.mark.parametrize("normalised", [True, False])
def test_chosen_experts(tokens, experts, count, normalised):
    logits = numbers(tokens, experts, dtype=HALF)
    shares, chosen = choose_triton(logits, count, normalised, torch.float32)
    expected, others = choose_reference(logits, count, normalised, torch.float32)
    close(shares, expected, 1e-5)
    close(logits.gather(1, chosen), logits.gather(1, others), 0)
    assert all(len(set(row)) == count for row in chosen.tolist())
    logits[0, 3] = float("nan")
    shares, chosen = choose_triton(logits, count, normalised, HALF)
    assert shares[0].isnan().all()
    assert shares[1:].isfinite().all()
    assert (chosen < experts).all()


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "changes", "found"),
    [("qwen3_moe", {}, 2), ("qwen3_moe", {"norm_topk_prob": True}, 2), ("mixtral", {}, 2), ("gpt_oss", {}, 0)],
)
def test_routers_of_a_model(monkeypatch, kind, changes, found):
    """The same shares, experts and dtypes; routers that choose in another way are left."""
    monkeypatch.setattr(fused_experts, "op", lambda _name: routed_experts_triton)
    monkeypatch.setattr(fused_experts, "choose_experts", lambda *given, **keys: choose_triton(*given, *keys.values()))
    model = tiny(kind, **changes).to(DEVICE)
    swaps = [(each, swap) for _, each, swap in find_experts(model) if "chosen in one" in str(swap)]
    assert len(swaps) == found
    for router, swap in swaps:
        router.half()
        inputs = [numbers(rows, 32, dtype=HALF) for rows in (1, 5, 80)]
        before = [router(x) for x in inputs]
        undo = swap.put()
        for x, expected in zip(inputs, before, strict=True):
            for one, other in zip(router(x), expected, strict=True):
                assert one.dtype == other.dtype
                close(one, other, 2e-3)
        undo()


def test_what_the_kernel_does_not_take_is_torchs():
    x, weight = numbers(2, 3, 20).requires_grad_(), numbers(7, 20)
    for ways in ((streamed_linear_triton, streamed_gated_triton), (streamed_linear, streamed_gated)):
        close(ways[0](x, [weight])[0], torch.nn.functional.linear(x, weight))
        ways[1](x, weight, weight, "silu").sum().backward()
    assert x.grad is not None


def test_programs_have_equal_shares():
    for tiles in (1, 16, 64, 96, 224, 2004):
        for steps in (1, 3, 32, 112):
            parts, each = kernels.parts_of(tiles, steps, 132)
            assert (parts - 1) * each < steps <= parts * each
            if steps == 112:
                waves = -(-tiles * parts // 132) * each
                assert waves <= 1.25 * tiles * steps / 132 + 4, (tiles, steps)


LOSS = {("w8a16", True): 0.008, ("w8a16", False): 0.008, ("w4a16", True): 0.13, ("w4a16", False): 0.11}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_packing_loses_what_the_bits_say(mode, symmetric):
    weight = numbers(40, 300)
    packed = pack(weight, mode, 128, symmetric)
    back = unpack(packed, torch.float32)
    assert back.shape == weight.shape
    loss = ((back - weight).norm() / weight.norm()).item()
    least, most = {"wf6af16": (0.03, 0.055), "fp8": (0.02, 0.03)}.get(mode, (0.001, LOSS.get((mode, symmetric))))
    assert least < loss < most
    bits = {"w8a16": 8, "w4a16": 4, "wf6af16": 6, "fp8": 8}[mode]
    padded = 300 if mode == "fp8" else 384
    assert packed.data.nbytes == 40 * padded * bits // 8
    again = pack(back, mode, 128, symmetric)
    assert ((unpack(again, torch.float32) - back).norm() / back.norm()).item() < 0.02, "packed numbers stay"


def test_six_bits_are_numbers_of_three_and_two():
    every = torch.tensor(
        [
            sign * (m / 16 if e == 0 else (4 + m) * 2.0 ** (e - 5))
            for sign in (1, -1)
            for e in range(8)
            for m in range(4)
        ]
    )
    row = torch.cat((every, every))[None]
    assert torch.equal(unpack(pack(row, "wf6af16"), torch.float32), row)
    assert every.max() == 28


@pytest.mark.parametrize("mode", MODES)
def test_zeros_and_slices_of_rows(mode):
    weight = numbers(6, 256)
    weight[2] = 0
    whole, part = pack(weight, mode), pack(weight[2:4], mode)
    assert torch.equal(unpack(whole, torch.float32)[2:4], unpack(part, torch.float32))
    assert not unpack(part, torch.float32)[0].any()


def test_what_cannot_be_packed_is_told():
    with pytest.raises(UsageError, match="group_size=64: expected a multiple of 128"):
        pack(numbers(4, 128), "w8a16", 64)
    with pytest.raises(UsageError, match=r"mode 'int3': expected one of w8a16"):
        pack(numbers(4, 128), "int3")
    with pytest.raises(UsageError, match=r"shape \(4,\)"):
        pack(numbers(4), "fp8")


CASES = [(mode, True) for mode in MODES] + [("w8a16", False), ("w4a16", False)]


@pytest.mark.parametrize(("mode", "symmetric"), CASES)
@pytest.mark.parametrize(
    ("rows", "inner", "group", "units"), [(1, 256, 128, 1), (20, 1040, 128, 5), (3, 400, 256, 1), (70, 512, 0, 9)]
)
def test_packed_linear(monkeypatch, mode, symmetric, rows, inner, group, units):
    monkeypatch.setattr(packed_kernels, "processors", lambda _device: units)
    x, bias = numbers(rows, inner, dtype=HALF) * inner**-0.5, numbers(130, dtype=HALF)
    packed = pack(numbers(130, inner), mode, group, symmetric)
    expected = packed_linear_reference(x, packed, bias)
    for found in (packed_linear_triton(x, packed, bias), packed_linear(x[None], packed, bias)[0]):
        if mode == "fp8" and rows > FEW_ROWS:  # x is rounded as well
            assert ((found - expected).norm() / expected.norm()).item() < 0.05
        else:
            close(found, expected, 8e-3)


def test_what_is_no_number_stays_so():
    x, packed = numbers(2, 256, dtype=torch.bfloat16), pack(numbers(130, 256), "fp8")
    x[1, 3] = torch.nan
    assert packed_linear_triton(x, packed).isnan().any(1).tolist() == [False, True]
