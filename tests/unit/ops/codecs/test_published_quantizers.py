"""The published quantisers: what comes back, and bad arguments."""

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer

from deepspeed.errors import UsageError
from deepspeed.ops.fp_quantizer import FP_Quantize, matmul_fp8
from deepspeed.ops.op_builder import QuantizerBuilder
from deepspeed.ops.quantizer import ds_quantizer


@pytest.mark.parametrize("asym", [False, True])
@pytest.mark.parametrize("sr", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_groups_are_rounded_in_place(bits, sr, asym):
    torch.manual_seed(0)
    x = torch.randn(8, 64) * torch.logspace(-2, 2, 8)[:, None] + 1
    before = x.clone()
    assert ds_quantizer(x, 8, bits, sr, asym) is x
    span = before.amax(1) - before.amin(1) if asym else 2 * before.abs().amax(1)
    step = span / (2**bits - (1 if asym else 2))
    assert ((x - before).abs().amax(1) <= step * (1 if sr else 0.5) * 1.001).all()
    for row in x:
        assert len(row.unique()) <= 2**bits
    with pytest.raises(UsageError, match="7 groups do not divide the 512"):
        ds_quantizer(x, 7)


@pytest.mark.parametrize(
    ("bits", "mantissa", "bound"), [(8, 3, 2**-4), (8, 2, 2**-3), (12, 4, 2**-5), (6, 2, 2**-3), (4, 1, 1 / 6)]
)
def test_small_floats_come_back(bits, mantissa, bound):
    torch.manual_seed(0)
    x, made = torch.randn(6, 256, dtype=torch.bfloat16), FP_Quantize(type("Config", (), {"group_size": 128})())
    codes, scales = made.quantize(x, bits, mantissa, return_meta_tensor=True)
    assert codes.shape == (12, 128 * bits // 8)
    assert torch.equal(scales, made.get_scales())
    back = made.dequantize(codes, q_bits=bits, q_mantisa_bits=mantissa)
    assert back.dtype == x.dtype
    assert ((back - x).abs().float() <= x.abs().amax().float() * (bound + 2**-8)).all()
    some = torch.tensor([4, 1])
    assert torch.equal(made.selective_dequantize(codes, some, q_bits=bits, q_mantisa_bits=mantissa), back[some])
    assert torch.equal(made.dequantize(codes, torch.empty_like(x), bits, mantissa, scales), back)


def test_a_product_with_an_8_bit_weight():
    torch.manual_seed(0)
    weight, x, made = torch.randn(128, 64), torch.randn(3, 128), FP_Quantize()
    made.group_size = 128
    codes = made.quantize(weight)
    found = matmul_fp8(x, codes, made.get_scales(), 128, made)
    assert (found - x @ weight).norm() < 0.05 * (x @ weight).norm()


def test_bad_arguments():
    made = FP_Quantize()
    with pytest.raises(UsageError, match="call quantize first"):
        made.dequantize(torch.zeros(1, 512, dtype=torch.uint8))
    with pytest.raises(UsageError, match="groups of 512 do not divide the 100"):
        made.quantize(torch.zeros(100))
    with pytest.raises(UsageError, match="5 bits"):
        made.quantize(torch.zeros(512), q_bits=5)
    with pytest.raises(UsageError, match="stochastic_mode"):
        made.quantize(torch.zeros(512), stochastic_mode=True)


def test_codes_of_the_builder():
    """Codes and back, within half a step of each group; the first of two codes in the low half of a byte."""
    op = QuantizerBuilder().load()
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) + 1
    for bits in (4, 8):
        for kind in (op.Symmetric, op.Asymmetric):
            codes, params = op.quantize(x, 16, bits, kind)
            assert codes.dtype == torch.int8
            assert codes.shape == (8, 64 * bits // 8)
            found = op.dequantize_fp32(codes, params, 16, bits, kind)
            assert found.shape == x.shape
            error = (found - x).abs().view(16, -1).amax(1)
            assert (error <= 0.5001 * params[:, 0]).all(), (bits, kind)
            torch.testing.assert_close(op.dequantize(codes, params, 16, bits, kind), found.half())
    codes, params = op.quantize(torch.tensor([7.0, -7.0, 1.0, 2.0]), 1, 4, op.Symmetric)
    assert codes.tolist() == [-0x69, 0x21]  # 7 and -7 as 0x97, 1 and 2
    assert params.tolist() == [[1.0]]
    rounded = op.ds_sr_quantize_asym_fp32(torch.linspace(0, 1, 64), 2, 4)
    assert len(rounded.unique()) <= 32
    assert torch.equal(op.ds_quantize_fp16(x.half().clone(), 4, 8), ds_quantizer(x.half().clone(), 4, 8))
    for words, call in (
        ("7 groups do not divide the 512", lambda: op.quantize(x, 7, 8, op.Symmetric)),
        ("bit_num is 5; expected 4 or 8", lambda: op.quantize(x, 8, 5, op.Symmetric)),
        ("found an odd number, 3", lambda: op.quantize(x[0, :3], 1, 4, op.Symmetric)),
    ):
        with pytest.raises(UsageError, match=words):
            call()


def test_weights_in_few_groups():
    quantizer = CUDAQuantizer()
    weight = torch.randn(100, 200)
    codes, scales = quantizer.quantize(weight)
    assert (codes.dtype, codes.shape, len(scales)) == (torch.int8, weight.shape, 4)
    found = quantizer.dequantize(codes, scales)
    assert (found - weight).abs().max() <= weight.abs().max() / 200


def test_two_hops_by_the_builder():
    """What the devices of two nodes send, take the mean of, and send on: the mean of all, but for codes."""
    ops, generator = QuantizerBuilder().load(), torch.Generator().manual_seed(0)
    symmetric = ops.Symmetric
    nodes, devices, chunk = 2, 2, 64
    tensors = [torch.randn(nodes * devices * chunk, generator=generator) for _ in range(nodes * devices)]
    groups = nodes * devices * 2
    for loco in (False, True):
        first, second = {}, {}
        for rank, tensor in enumerate(tensors):
            errors = torch.zeros(tensor.numel())
            if loco:
                first[rank] = ops.loco_swizzle_quant(tensor, errors, 0.5, groups, 8, symmetric, 1, nodes, devices)
                assert 0 < float(errors.abs().max()) < 0.02
            else:
                first[rank] = ops.swizzle_quant(tensor, groups, 8, symmetric, 1, nodes, devices)
        for rank in range(nodes * devices):
            node, place = divmod(rank, devices)
            came = [first[node * devices + other] for other in range(devices)]
            codes = torch.cat([each[0].chunk(devices)[place] for each in came])
            scales = torch.cat([each[1].chunk(devices)[place] for each in came])
            arguments = (groups, groups // devices, 8, symmetric, devices)
            if loco:
                errors = torch.zeros(nodes * chunk)
                second[rank] = ops.loco_quantized_reduction(codes, scales, errors, 0.5, *arguments)
            else:
                second[rank] = ops.quantized_reduction(codes, scales, *arguments)
        mean = sum(tensors) / len(tensors)
        for rank in range(nodes * devices):
            node, place = divmod(rank, devices)
            parts = []
            for other in range(nodes):
                codes, scales = second[other * devices + place]
                wide = ops.dequantize_fp32(codes, scales, len(scales), 8, symmetric)
                parts.append(wide.chunk(nodes)[node])
            torch.testing.assert_close(sum(parts) / nodes, mean[rank * chunk :][:chunk], atol=0.03, rtol=0)
    with pytest.raises(UsageError, match="10 elements are not equal chunks"):
        ops.swizzle_quant(torch.ones(10), 1, 8, symmetric, 1, 2, 2)
