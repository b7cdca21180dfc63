"""Codecs on one CUDA device: bits beside the reference, and time beside a copy of the same bytes.

    python -m benchmarks.gpu_codecs

Bytes are those that have to move at least: what is read and written once. A copy moves half of them in each direction.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu_kernels import GB, seconds

__all__ = ["Line", "main"]

NUMEL, ROWS, ODD = 1 << 28, 8, 100_003


class Line(NamedTuple):
    """An operation of a codec."""

    name: str
    run: Callable[[], Any]
    moved: int
    """Bytes."""


def main() -> int:
    """Print whether bits are equal, and the table; 1 if bits differ."""
    from deepspeed.comm.codec import BLOCKS, SIGN, block_codec

    copy, wrong = _copy(), 0
    print(f"copy: {copy / GB:.0f} GB/s", flush=True)
    for codec in (*(block_codec(name) for name in BLOCKS), SIGN):
        same = _same_signs() if codec is SIGN else _same(codec)
        wrong += not same
        print(f"{codec.name}: bits {'equal' if same else 'differ'}", flush=True)
        for line in _lines(codec):
            took = seconds(line.run, repeat=10)
            rate = line.moved / took
            print(
                f"{line.name:28} {1e3 * took:7.3f} ms {rate / GB:6.0f} GB/s, {copy / rate:4.2f} times a copy",
                flush=True,
            )
    return int(bool(wrong))


def _copy() -> float:
    """Bytes per second."""
    spare = torch.empty(2, NUMEL, dtype=torch.bfloat16, device="cuda")
    return 2 * spare[0].nbytes / seconds(lambda: spare[1].copy_(spare[0]))


def _lines(codec: Any) -> Iterator[Line]:
    for dtype in (torch.bfloat16, torch.float32) if codec.name in ("int8", "int4", "sign") else (torch.bfloat16,):
        x = torch.randn(NUMEL, device="cuda", dtype=dtype)
        message = codec.encode(x)
        kind = str(dtype).removeprefix("torch.")
        yield Line(f"{codec.name} encode {kind}", lambda x=x, m=message: codec.encode(x, m), x.nbytes + message.nbytes)
        yield Line(f"{codec.name} decode {kind}", lambda x=x, m=message: codec.decode(m, x), x.nbytes + message.nbytes)
    part = torch.randn(ROWS, NUMEL // ROWS, device="cuda")
    messages, out = codec.encode(part), torch.empty(NUMEL // ROWS, device="cuda")
    yield Line(f"{codec.name} sum of {ROWS}", lambda: codec.decode_sum(messages, out), messages.nbytes + out.nbytes)


def _same(codec: Any) -> bool:
    """Whether kernels and references make the same bits, also of short blocks and of rows."""
    from deepspeed.ops.codecs import rows

    good = True
    for numel in (37, ODD):
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(3, numel, device="cuda").mul_(torch.logspace(-2, 2, 3, device="cuda")[:, None]).to(dtype)
            found = codec.encode(x)
            payload, scales = codec.parts(torch.zeros_like(found), numel)
            rows.encode_reference(codec.form, codec.block, x, payload, scales)
            good &= all(map(torch.equal, codec.parts(found, numel), (payload, scales)))
            expected = torch.empty_like(x)
            rows.decode_reference(codec.form, codec.block, payload, scales, expected)
            good &= torch.equal(codec.decode(found, torch.empty_like(x)), expected)
            total = torch.empty(numel, device="cuda")
            rows.sum_reference(codec.form, codec.block, payload, scales, total)
            good &= torch.equal(codec.decode_sum(found, torch.empty_like(total)), total)
    return good


def _same_signs() -> bool:
    from deepspeed.comm.codec import SIGN
    from deepspeed.ops.codecs import rows

    good = True
    for numel in (37, ODD):
        x = torch.randn(3, numel, device="cuda")
        found = SIGN.encode(x)
        payload, scales = SIGN.parts(found, numel)
        expected: Tensor = torch.empty_like(payload)
        rows.signs_reference(x, expected)
        values, total = torch.empty_like(x), torch.empty(numel, device="cuda")
        rows.signed_reference(payload, scales, values, False)
        rows.signed_reference(payload, scales, total, True)
        good &= torch.equal(payload, expected) and torch.equal(SIGN.decode(found, torch.empty_like(x)), values)
        good &= torch.equal(SIGN.decode_sum(found, torch.empty_like(total)), total)
    return good


if __name__ == "__main__":
    sys.exit(main())
