"""`Quantizer`: a script's own MoQ, which rounds parameters in place after optimizer steps and drops their bits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.compression.layer_state import require_whole
from deepspeed.errors import UsageError
from deepspeed.log import log_dist
from deepspeed.ops.quantizer.quantizer import round_groups
from deepspeed.transformers.replacement import whole_shape

__all__ = ["Quantizer"]


@dataclass(eq=False)
class ParameterQuantizer:
    """Rounds the parameters of two dims or more that have attributes `start_bits`, `target_bits` and `q_period`.

    After `q_period` steps a parameter's `start_bits` falls by one, down to `target_bits`, and its period doubles.
    `q_type` is 0 for codes around zero and 1 for codes from the least number to the largest; `q_rounding` 0 rounds to
    the nearest code and 1 at random. `q_eigenvalue` and `layer_num` are kept for scripts that read them.
    """

    q_groups: int = 1
    q_mixed_fp16: bool = False
    q_change_ratio: float = 0.01
    q_type: int = 0
    q_rounding: int = 0
    q_verbose: bool = False
    q_eigenvalue: bool = False
    use_quantizer_kernel: bool = False
    """Changes nothing: all devices round by the same operations."""
    layer_num: int = 0
    qsteps: int = field(default=0, init=False)
    quantize_real_ratio: float = field(default=1.0, init=False)
    """The share of the unrounded weight, of `q_mixed_fp16`."""
    _seen: list[Any] = field(default_factory=list, init=False, repr=False)

    def any_precision_switch(self) -> bool:
        """Whether a bit goes at the next step, of the parameters that were last rounded; true before there are any."""
        return not self._seen or any(self._drops(param, self.qsteps + 1) for param in self._seen)

    def quantize(
        self,
        parameter_group: Iterable[Sequence[nn.Parameter]],
        overflow: bool,
        eigenvalue_enabled: bool,
        block_eigenvalue: Mapping[int, tuple[float, int]] | None = None,
    ) -> None:
        """Round the parameters of groups after an optimizer step, which an overflow skipped.

        `block_eigenvalue` is that of `Eigenvalue.compute_eigenvalue`: a period is multiplied by 1 + floor(4 * share).
        """
        if overflow and not eigenvalue_enabled:
            return
        self.step()
        self.update_fp16_ratio()
        self._seen = [
            param
            for group in parameter_group
            for param in group
            if len(whole_shape(param)) > 1 and getattr(param, "start_bits", None)
        ]
        for param in self._seen:
            require_whole(param, "Quantizer.quantize")
            share, layer = (block_eigenvalue or {}).get(id(param), (0.0, 0))
            param.data = self.compute_quantization(param, layer, 1 + math.floor(4 * share))

    def step(self) -> None:
        """Count an optimizer step."""
        self.qsteps += 1

    def update_fp16_ratio(self) -> None:
        """Let the share of the unrounded weight fall."""
        if self.q_mixed_fp16:
            self.quantize_real_ratio = max(0.0, self.quantize_real_ratio - self.q_change_ratio)

    def compute_quantization(self, input: Any, index: int = 0, factor: int = 1) -> Tensor:
        """The parameter rounded to its bits of this step, in its dtype."""
        if self._drops(input, self.qsteps):
            self.quantize_real_ratio = 1.0
            input.q_period *= 2 * factor
            input.start_bits -= 1
            if self.q_verbose:
                log_dist(f"layer {index}: {input.start_bits} bits from step {self.qsteps} on, for {input.q_period}")
        bits, values = input.start_bits, input.detach()
        rounds = {1: self.quantize_binary, 2: self.quantize_tenary}.get(bits)
        found = self.quantize_highbit(values, bits) if rounds is None else rounds(values)
        return self.mixed_fp16_quantize(values, found, index)

    @staticmethod
    def _drops(param: Any, step: int) -> bool:
        return bool(param.start_bits > param.target_bits and step >= param.q_period)

    def quantize_highbit(self, inputs: Tensor, num_bits: int) -> Tensor:
        """Rounded to even steps."""
        return self._rounded(inputs, num_bits)

    def quantize_tenary(self, inputs: Tensor) -> Tensor:
        """Rounded to zero and one magnitude of both signs in each group."""
        return self._rounded(inputs, 2)

    def quantize_binary(self, inputs: Tensor) -> Tensor:
        """Rounded to one magnitude of both signs in each group."""
        return self._rounded(inputs, 1)

    def mixed_fp16_quantize(self, input: Tensor, input_q: Tensor, index: int) -> Tensor:
        """The mean of both that `q_mixed_fp16` asks for."""
        share = self.quantize_real_ratio if self.q_mixed_fp16 else 0.0
        return input_q.lerp(input, share) if share else input_q

    @torch.no_grad()
    def _rounded(self, inputs: Tensor, bits: int) -> Tensor:
        if inputs.numel() % self.q_groups:
            raise UsageError(
                f"Quantizer: q_groups is {self.q_groups}, which does not divide {inputs.numel()} elements; give one "
                "that does"
            )
        rows = inputs.reshape(self.q_groups, -1)
        noise = torch.rand_like(rows, dtype=torch.float32) if self.q_rounding == 1 and bits > 2 else None
        found = round_groups(rows, bits, asym=self.q_type == 1, noise=noise)
        return found.values.view(inputs.shape).to(inputs.dtype)


Quantizer = ParameterQuantizer
"""Its published name."""
