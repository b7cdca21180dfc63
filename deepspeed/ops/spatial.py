"""Sums of biases and images [batch, channels, height, width] of any memory format, which the result keeps."""

from __future__ import annotations

from torch import Tensor

from deepspeed.errors import UsageError

__all__ = ["nhwc_bias_add", "nhwc_bias_add_add", "nhwc_bias_add_bias_add"]


def _with_bias(images: Tensor, bias: Tensor) -> Tensor:
    if images.dim() != 4 or tuple(bias.shape) != (images.shape[1],):
        raise UsageError(
            f"a bias has shape {tuple(bias.shape)} and its images {tuple(images.shape)}; expected [channels] and "
            "[batch, channels, height, width]"
        )
    return images + bias[:, None, None]


def nhwc_bias_add(activation: Tensor, bias: Tensor) -> Tensor:
    """activation + bias."""
    return _with_bias(activation, bias)


def nhwc_bias_add_add(activation: Tensor, bias: Tensor, other: Tensor) -> Tensor:
    """activation + bias + other."""
    return _with_bias(activation, bias) + other


def nhwc_bias_add_bias_add(activation: Tensor, bias: Tensor, other: Tensor, other_bias: Tensor) -> Tensor:
    """(activation + bias) + (other + other_bias)."""
    return _with_bias(activation, bias) + _with_bias(other, other_bias)
