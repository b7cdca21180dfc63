"""Few rows times large weights, which is as fast as the weights are read: ops `streamed_linear`, `streamed_gated`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from deepspeed.ops.model.gated import gated
from deepspeed.ops.model.linear import takes
from deepspeed.ops.registry import by_triton, op, reference

__all__ = ["MOST_ROWS", "MOST_WEIGHTS", "streamed_gated", "streamed_linear"]

MOST_ROWS = 64
"""Rows up to which reading the weights takes longer than multiplying; more are torch's."""
MOST_WEIGHTS = 3
"""Weights of one launch."""

Biases = Sequence[Tensor | None] | None


def streamed_linear(x: Tensor, weights: Sequence[Tensor], biases: Biases = None) -> list[Tensor]:
    """`functional.linear` of x [..., in] with each weight [out, in] and bias; few rows take one launch for all."""
    result: list[Tensor] = op("streamed_linear")(x, weights, biases)
    return result


def streamed_gated(x: Tensor, gate: Tensor, up: Tensor, kind: str, biases: Biases = None) -> Tensor:
    """act(x · gateᵀ) · (x · upᵀ), op `gated` of both products; few rows take one launch."""
    result: Tensor = op("streamed_gated")(x, gate, up, kind, biases)
    return result


@reference("streamed_linear")
def streamed_linear_reference(x: Tensor, weights: Sequence[Tensor], biases: Biases = None) -> list[Tensor]:
    """In plain torch."""
    given = [None] * len(weights) if biases is None else biases
    return [functional.linear(x, weight, bias) for weight, bias in zip(weights, given, strict=True)]


@reference("streamed_gated")
def streamed_gated_reference(x: Tensor, gate: Tensor, up: Tensor, kind: str, biases: Biases = None) -> Tensor:
    """By two products."""
    first, second = streamed_linear_reference(x, (gate, up), biases)
    return gated(first, second, kind)


def _streams(x: Tensor, weights: Sequence[Tensor], biases: Biases) -> bool:
    """Whether the kernel runs: few rows of 16 bits, weights whose rows are contiguous and begin at 16 bytes."""
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    return (
        takes(x)
        and 0 < rows <= MOST_ROWS
        and x.dtype != torch.float32
        and x.shape[-1] % 16 == 0
        and all(w.dtype == x.dtype and w.stride(-1) == 1 and w.stride(0) % 8 == 0 for w in weights)
        and all(bias is None or bias.is_contiguous() for bias in biases or ())
        and not torch.is_grad_enabled()
    )


@by_triton("streamed_linear")
def streamed_linear_triton(x: Tensor, weights: Sequence[Tensor], biases: Biases = None) -> list[Tensor]:
    """By the kernel where it can; without gradients only."""
    if not _streams(x, weights, biases):
        return streamed_linear_reference(x, weights, biases)
    from deepspeed.ops.generate.kernels.streaming import stream

    given = [None] * len(weights) if biases is None else list(biases)
    rows = x.reshape(-1, x.shape[-1])
    found = [
        each
        for at in range(0, len(weights), MOST_WEIGHTS)
        for each in stream(rows, weights[at : at + MOST_WEIGHTS], given[at : at + MOST_WEIGHTS])
    ]
    return [each.view(*x.shape[:-1], each.shape[-1]) for each in found]


@by_triton("streamed_gated")
def streamed_gated_triton(x: Tensor, gate: Tensor, up: Tensor, kind: str, biases: Biases = None) -> Tensor:
    """By the kernel where it can; without gradients only."""
    if not _streams(x, (gate, up), biases) or gate.shape != up.shape:
        return streamed_gated_reference(x, gate, up, kind, biases)
    from deepspeed.ops.generate.kernels.streaming import stream_gated

    given = [None, None] if biases is None else list(biases)
    return stream_gated(x.reshape(-1, x.shape[-1]), (gate, up), given, kind).view(*x.shape[:-1], gate.shape[0])
