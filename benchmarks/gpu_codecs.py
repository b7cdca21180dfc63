"""Codecs on one CUDA device: bits beside the reference, and time beside a copy of the same bytes.

    python -m benchmarks.gpu_codecs [int8 int4 ...]

Bytes are those that have to move at least: what is read and written once. A line for each codec: how many bytes or
numbers differ from the reference, then times as multiples of the time of a copy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu_kernels import GB, seconds
from deepspeed.comm.codec import BLOCKS, SIGN, BlockCodec, SignCodec, block_codec
from deepspeed.ops.codecs import rows

__all__ = ["Line", "main"]

NUMEL, ROWS, ODD = 1 << 28, 8, 100_003


class Line(NamedTuple):
    """An operation of a codec."""

    name: str
    run: Callable[[], Any]
    moved: int
    """Bytes."""


def main() -> int:
    """Print the table; 1 if bits differ."""
    asked, copy, wrong = sys.argv[1:] or [*BLOCKS, "sign"], _copy(), False
    print(f"copy: {copy / GB:.0f} GB/s", flush=True)
    for name in asked:
        codec = SIGN if name == "sign" else block_codec(name)
        apart = " ".join(_apart_signs() if isinstance(codec, SignCodec) else _apart(codec))
        wrong |= bool(apart)
        times = [f"{line.name} {seconds(line.run, repeat=10) * copy / line.moved:.2f}" for line in _lines(codec)]
        print(f"{name}: bits {apart or 'equal'}; times a copy: {', '.join(times)}", flush=True)
    return int(wrong)


def _copy() -> float:
    """Bytes per second."""
    spare = torch.empty(2, NUMEL, dtype=torch.bfloat16, device="cuda")
    return 2 * spare[0].nbytes / seconds(lambda: spare[1].copy_(spare[0]))


def _lines(codec: BlockCodec | SignCodec) -> Iterator[Line]:
    for dtype in (torch.bfloat16, torch.float32) if codec.name in ("int8", "int4", "sign") else (torch.bfloat16,):
        x = torch.randn(NUMEL, device="cuda", dtype=dtype)
        message = codec.encode(x)
        kind = str(dtype).removeprefix("torch.")
        yield Line(f"encode {kind}", lambda x=x, m=message: codec.encode(x, m), x.nbytes + message.nbytes)  # type: ignore[misc]
        yield Line(f"decode {kind}", lambda x=x, m=message: codec.decode(m, x), x.nbytes + message.nbytes)  # type: ignore[misc]
    part = torch.randn(ROWS, NUMEL // ROWS, device="cuda")
    messages, out = codec.encode(part), torch.empty(NUMEL // ROWS, device="cuda")
    yield Line(f"sum of {ROWS}", lambda: codec.decode_sum(messages, out), messages.nbytes + out.nbytes)


def _differ(what: str, found: Tensor, expected: Tensor) -> Iterator[str]:
    bad = (found != expected).flatten()
    if bad.any():
        at = int(bad.nonzero()[0])
        one, other = found.flatten()[at].item(), expected.flatten()[at].item()
        yield f"{what}: {int(bad.sum())} of {bad.numel()} differ, the first {one} for {other}"


def _apart(codec: BlockCodec) -> Iterator[str]:
    """Where kernels and references make other bits, also of short blocks and of rows."""
    for numel in (37, ODD):
        places = ((0, numel, 0, 0),)
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(3, numel, device="cuda").mul_(torch.logspace(-2, 2, 3, device="cuda")[:, None]).to(dtype)
            found = codec.encode(x)
            payload, scales = codec.parts(torch.zeros_like(found), numel)
            rows.encode_reference(codec.form, codec.block, places, x, payload, scales)
            yield from _differ("payload", codec.parts(found, numel)[0], payload)
            yield from _differ("scales", codec.parts(found, numel)[1], scales)
            payload, scales = codec.parts(found, numel)
            expected = torch.empty_like(x)
            rows.sum_reference(codec.form, codec.block, places, payload[None], scales[None], expected)
            yield from _differ("decoded", codec.decode(found, torch.empty_like(x)), expected)
            total = torch.empty(1, numel, device="cuda")
            rows.sum_reference(codec.form, codec.block, places, payload[:, None], scales[:, None], total)
            yield from _differ("sum", codec.decode_sum(found, torch.empty(numel, device="cuda")), total[0])


def _apart_signs() -> Iterator[str]:
    for numel in (37, ODD):
        x = torch.randn(3, numel, device="cuda")
        found = SIGN.encode(x)
        payload, scales = SIGN.parts(found, numel)
        expected = torch.empty_like(payload, memory_format=torch.contiguous_format)
        rows.signs_reference(x, expected)
        yield from _differ("payload", payload, expected)
        values, total = torch.empty_like(x), torch.empty(numel, device="cuda")
        rows.signed_reference(payload, scales, values, False)
        rows.signed_reference(payload, scales, total, True)
        yield from _differ("decoded", SIGN.decode(found, torch.empty_like(x)), values)
        yield from _differ("sum", SIGN.decode_sum(found, torch.empty_like(total)), total)


if __name__ == "__main__":
    sys.exit(main())
