"""Many tensors in one launch: their addresses as a table, programs dealt out over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton.language as tl
from torch import Tensor

from deepspeed.ops.blockwise import BLOCK as SHARE
from deepspeed.ops.kernels.update import trust_kernel, update_kernel
from deepspeed.ops.one_pass import Conditions
from deepspeed.ops.optimizer import ParameterBatch
from deepspeed.ops.precompile import launch as launch_kernel

_ALIGNED = 16
_NUMBERS = 8
_PARTIALS = 1024

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.uint8: tl.uint8}


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a program: how many elements it updates, with how many warps."""

    block: int
    warps: int


SHAPE = Shape(1024, 4)
"""The fastest or nearly so for every rule, with moments of 8 bits too; `python -m benchmarks.gpu_kernels --sweep` tries
others. A block is a multiple of `SHARE`, the codes that have a scale together."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Lists of as many contiguous tensors, of one dtype each; a rule reads and writes those that it needs."""

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    first: Sequence[Tensor]
    """The first moment."""
    second: Sequence[Tensor] = ()
    """The second one, or what else a rule reads."""
    outs: Sequence[Tensor] = ()
    """Where updated parameters are written as well."""
    scales: Sequence[Sequence[Tensor]] = ()
    """Of moments that are 8-bit codes: one list per moment."""

    @classmethod
    def of(cls, batch: ParameterBatch) -> Columns:
        """Those of a batch."""
        first, *second = batch.moments
        return cls(batch.params, batch.grads, first, second[0] if second else (), batch.outs, batch.scales)

    def lists(self) -> list[Sequence[Tensor]]:
        """As the kernel has them; what is absent is never read."""
        scales = [*self.scales, (), ()][:2]
        return [each or self.params for each in (self.params, self.grads, self.first, self.second, self.outs, *scales)]


@dataclass(frozen=True, slots=True)
class Launch:
    """What a rule is given besides tensors."""

    rule: str
    numbers: Sequence[float]
    factor: float = 1.0
    step: int = 0
    conditions: Conditions | None = None
    beside: Tensor | None = None
    """Memory of the rule's own."""


def launch(columns: Columns, call: Launch) -> None:
    """Run a rule's body over all elements."""
    lists, device = columns.lists(), columns.params[0].device
    pointers = [tensor.data_ptr() for row in zip(*lists, strict=True) for tensor in row]
    table = _sent(torch.tensor(pointers, dtype=torch.int64), device)
    sizes = tuple(param.numel() for param in columns.params)
    aligned = all(number % _ALIGNED == 0 for number in (*pointers, *sizes))  # whole vectors are all there is
    owners, places = _programs(sizes, SHAPE.block, device)
    anything = columns.params[0]  # where there are no conditions nothing is read
    given = call.conditions
    types = [_TYPES[tensors[0].dtype] for tensors in lists]
    launch_kernel(
        update_kernel, (owners.numel(),),
        table, owners, places, anything if given is None else given.divisor, anything if given is None else given.skip,
        anything if call.beside is None else call.beside, call.factor, call.step,
        *[*call.numbers, *[0.0] * _NUMBERS][:_NUMBERS],
        RULE=call.rule, PARAM=types[0], GRAD=types[1], FIRST=types[2], SECOND=types[3], OUT=types[4],
        HAS_OUT=bool(columns.outs), CODED=bool(columns.scales), CONDITIONS=given is not None, SHARE=SHARE,
        ALIGNED=aligned, BLOCK=SHAPE.block, num_warps=SHAPE.warps,
    )  # fmt: skip


def programs_of(columns: Columns) -> int:
    """How many programs update these."""
    return sum(-(-param.numel() // SHAPE.block) for param in columns.params)


def trust_ratios(columns: Columns, partial: Tensor, low: float, high: float) -> Tensor:
    """LAMB's coefficients, one for each tensor, of sums of squares [programs, 2] of weights and of updates."""
    params = columns.params
    _, places = _programs(tuple(param.numel() for param in params), SHAPE.block, params[0].device)
    found = torch.empty(len(params), device=params[0].device)
    launch_kernel(trust_kernel, (len(params),), partial, places, found, low, high, BLOCK=SHAPE.block, WIDTH=_PARTIALS)
    return found


@lru_cache(maxsize=64)
def _programs(sizes: tuple[int, ...], block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(the tensor of each program; the first program and the size of each tensor), the same at every step."""
    numels = torch.tensor(sizes, dtype=torch.int64)
    counts = (numels + block - 1) // block
    owners = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), counts)
    places = torch.stack((counts.cumsum(0) - counts, numels), 1)
    return _sent(owners, device), _sent(places, device)


def _sent(table: Tensor, device: torch.device) -> Tensor:
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)
