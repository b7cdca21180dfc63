"""Codecs: sizes, bounds and sums of every format at any length."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.comm.codec import BLOCKS, SIGN, BlockCodec, block_codec
from deepspeed.ops.codecs.formats import FORMATS, pack, unpack

LENGTHS = (1, 5, 256, 512, 777, 4099, 9001)
# The largest distance of a decoded number from what it was, over its block's largest magnitude.
BOUND = {
    "int8": 1 / 254,
    "int4": 1 / 14,
    "fp8_e4m3": 2**-4,
    "fp8_e5m2": 2**-3,
    "fp4": 1 / 6,
    "fp6": 2**-3,
    "fp12": 2**-5,
}


def numbers(rows, numel, seed=0):
    made = torch.Generator().manual_seed(seed)
    return torch.randn(rows, numel, generator=made) * torch.logspace(-3, 3, rows)[:, None]


def same(codec, numel, one, other):
    """The same codes and scales; what fills a message up is anything."""
    return all(map(torch.equal, codec.parts(one, numel), codec.parts(other, numel)))


def codecs():
    return [block_codec(name) for name in FORMATS] + [BlockCodec("int8", 32), BlockCodec("int4", 2048)]


@pytest.mark.parametrize("codec", codecs(), ids=lambda codec: f"{codec.form}-{codec.block}")
@pytest.mark.parametrize("numel", LENGTHS)
def test_a_row_comes_back_within_its_bound(codec, numel):
    x = numbers(3, numel)
    message = codec.encode(x)
    assert message.shape == (3, codec.nbytes(numel))
    back = codec.decode(message, torch.empty_like(x))
    for start in range(0, numel, codec.block):
        part = slice(start, start + codec.block)
        largest = x[:, part].abs().amax(1, keepdim=True)
        assert ((back - x)[:, part].abs() <= largest * (BOUND[codec.form] + 1e-6)).all()
    total = codec.decode_sum(message, torch.empty(numel))
    assert torch.equal(total, (back[0] + back[1]) + back[2])
    several = codec.decode_sum(torch.stack([message, message.flip(0)], 1), torch.empty(2, numel))
    assert torch.equal(several[0], total)
    assert torch.equal(several[1], (back[2] + back[1]) + back[0])
    assert same(codec, numel, codec.encode(x[1]), message[1])  # a row does not depend on the others


@pytest.mark.parametrize("numel", [*LENGTHS, 4096, 8192])
def test_signs(numel):
    x = numbers(3, numel)
    x[0, 0] = 0
    message = SIGN.encode(x)
    back = SIGN.decode(message, torch.empty_like(x))
    assert torch.equal(back < 0, x < 0)  # the sign of zero is plus
    torch.testing.assert_close(back.abs(), (x.norm(dim=1) / numel**0.5)[:, None].expand_as(x))
    assert torch.equal(SIGN.decode_sum(message, torch.empty(numel)), (back[0] + back[1]) + back[2])
    assert SIGN.nbytes(numel) <= numel / 8 + 8


@pytest.mark.parametrize("form", BLOCKS)
def test_scales_are_two_percent_at_most(form):
    codec, numel = block_codec(form), 1 << 20
    assert 4 * codec.scales(numel) <= 0.02 * codec.nbytes(numel)
    assert codec.payload_bytes(numel) == numel * FORMATS[form].bits // 8


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([4, 6, 12]), st.integers(1, 40), st.integers(0, 1 << 30))
def test_packing_loses_nothing(bits, group, seed):
    lanes = next(form.lanes for form in FORMATS.values() if form.bits == bits)
    codes = torch.randint(
        1 << bits, (2, lanes, group), dtype=torch.int32, generator=torch.Generator().manual_seed(seed)
    )
    assert torch.equal(unpack(pack(codes, bits), bits), codes)


@pytest.mark.parametrize("form", [form for form in FORMATS.values() if form.exponent], ids=lambda form: form.name)
def test_every_small_float_is_itself(form):
    codes = torch.arange(1 << form.bits, dtype=torch.int32)
    values = form.values(codes)
    assert values.max() == form.largest
    assert torch.equal(form.codes(values), codes)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_a_number_that_is_not_finite_is_still_seen(form, bad):
    codec, x = block_codec(form, 128), numbers(1, 1000)[0]
    x[300] = bad
    back = codec.decode(codec.encode(x), torch.empty_like(x))
    assert not back[300].isfinite()
    assert back[:256].isfinite().all()
    assert back[384:].isfinite().all()


@pytest.mark.parametrize("codec", codecs(), ids=lambda codec: f"{codec.form}-{codec.block}")
def test_zeros_and_the_smallest_numbers(codec):
    for x in (torch.zeros(1000), torch.full((1000,), 1e-44)):
        assert not codec.decode(codec.encode(x), torch.empty_like(x)).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype):
    codec, x = block_codec("int8"), numbers(1, 600)[0].to(dtype)
    message = codec.encode(x)
    assert same(codec, 600, message, codec.encode(x.float()))
    assert torch.equal(codec.decode(message, torch.empty_like(x)), codec.decode(message, torch.empty(600)).to(dtype))


def test_rounding_at_random_has_the_right_mean():
    codec, x = block_codec("int4"), torch.full((4096,), 0.3)
    x[::512] = 1.0
    backs = [codec.decode(codec.encode(x, seed=seed), torch.empty_like(x)) for seed in range(50)]
    assert abs(torch.stack(backs)[:, 1:512].mean() - 0.3) < 2e-3
    assert same(codec, 4096, codec.encode(x, seed=3), codec.encode(x, seed=3))
