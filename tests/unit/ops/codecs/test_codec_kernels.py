"""Kernels of codecs beside their references: the same bits."""

import pytest
import torch

from tests.unit.ops.model.interpreted import DEVICE, numbers

from deepspeed.comm.codec import BlockCodec  # isort: skip
from deepspeed.ops.codecs import rows  # isort: skip
from deepspeed.ops.codecs.formats import FORMATS

LENGTHS = (31, 4096 + 805)


def close(found, expected, form):
    """The same bits; the interpreter loses the carry of some numbers that round up to a power of two in 8 bits."""
    apart = (found != expected).sum()
    assert apart <= (max(1, 0.25 * found.numel()) if form.startswith("fp8") and DEVICE == "cpu" else 0)


OUT = torch.bfloat16 if DEVICE != "cpu" else torch.float32  # the interpreter cuts bits off where devices round


@pytest.mark.parametrize("numel", LENGTHS)
@pytest.mark.parametrize(
    ("form", "dtype"),
    [*((form, torch.float32) for form in FORMATS), ("int8", torch.bfloat16), ("int4", torch.bfloat16)],
)
def test_blocks(form, numel, dtype):
    block, kind, places = 256, FORMATS[form], ((0, numel, 0, 0),)
    x = (numbers(3, numel + 8, seed=numel) * torch.logspace(-3, 3, 3, device=DEVICE)[:, None])[:, 8:].to(dtype)
    x[0, : numel // 3] = 0
    made = []
    for encode in (rows.encode_reference, rows.encode_triton):
        payload = torch.zeros(3, kind.payload_bytes(numel, block), dtype=torch.uint8, device=DEVICE)
        scales = torch.zeros(3, -(-numel // block), device=DEVICE)
        encode(form, block, places, x, payload, scales)
        made.append((payload, scales))
    (payload, scales), (found, found_scales) = made
    assert torch.equal(scales, found_scales)
    close(found, payload, form)
    outs = [torch.empty(3, numel, device=DEVICE, dtype=OUT) for _ in range(2)]
    rows.sum_reference(form, block, places, payload[None], scales[None], outs[0])
    rows.sum_triton(form, block, places, payload[None], scales[None], outs[1])
    close(outs[1], outs[0], form)
    sums = [torch.empty(1, numel, device=DEVICE) for _ in range(2)]
    rows.sum_reference(form, block, places, payload[:, None], scales[:, None], sums[0])
    rows.sum_triton(form, block, places, payload[:, None], scales[:, None], sums[1])
    close(sums[1], sums[0], form)


@pytest.mark.parametrize("numel", LENGTHS)
def test_sign_bits(numel):
    x = numbers(3, numel, seed=numel).to(torch.bfloat16)
    x[0, 0] = 0
    payloads = [torch.zeros(3, rows.sign_bytes(numel), dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    norms = [rows.signs_reference(x, payloads[0]), rows.signs_triton(x, payloads[1])]
    assert torch.equal(*payloads)
    torch.testing.assert_close(*norms)
    scales = torch.tensor([[0.5], [0.1], [3.0]], device=DEVICE)
    outs = [torch.empty(3, numel, device=DEVICE, dtype=OUT) for _ in range(2)]
    sums = [torch.empty(numel, device=DEVICE) for _ in range(2)]
    for run, out, total in zip((rows.signed_reference, rows.signed_triton), outs, sums, strict=True):
        run(payloads[0], scales, out, False)
        run(payloads[0], scales, total, True)
    assert torch.equal(*outs)
    assert torch.equal(*sums)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_parts_of_rows(form):
    """Several parts at once are each of them by itself, whatever lies between them."""
    block, x, codec = 256, numbers(2, 9000, seed=3), BlockCodec(form, 256)
    parts = ((8, 4096 + 300), (4405, 37), (4450, 4096), (8600, 256))
    size = sum(codec.nbytes(length) for _, length in parts)
    messages = [torch.zeros(2, size, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    outs = [torch.full((2, 9000), 7.0, device=DEVICE) for _ in range(2)]
    places = codec.places(parts)
    for message, out, encode, add in zip(
        messages,
        outs,
        (rows.encode_reference, rows.encode_triton),
        (rows.sum_reference, rows.sum_triton),
        strict=True,
    ):
        encode(form, block, places, x, message, message.view(torch.float32))
        both = torch.stack([message, message])
        add(form, block, places, both, both.view(torch.float32), out)
    assert torch.equal(*messages)
    assert torch.equal(*outs)
    at = 0
    for start, length in parts:
        alone = torch.zeros(2, codec.nbytes(length), dtype=torch.uint8, device=DEVICE)
        codec.encode(x[:, start : start + length], alone)
        assert torch.equal(messages[0][:, at : at + alone.shape[1]], alone)
        at += alone.shape[1]
    assert (outs[1][:, :8] == 7.0).all()


def test_memory_of_the_host_is_left_to_the_reference(monkeypatch):
    """Also on a machine with a device, where kernels are compiled and cannot read it."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    values, payload, scales = torch.randn(2, 64), torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2, 1)
    assert not rows._takes(64, values, payload, scales)
