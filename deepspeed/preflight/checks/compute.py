"""Computing: every rank multiplies the same matrices; a device that is hot, shared or broken takes longer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.bench.measure import seconds
from deepspeed.preflight.check import Check, Here
from deepspeed.preflight.finding import Finding, Level, Told, among, who
from deepspeed.preflight.slow import level_of, stragglers

__all__ = ["Compute", "ComputeFact"]

_CPU, _DEVICE = 512, 4096  # rows of the matrices
_TRIALS = 5


@dataclass(frozen=True, slots=True)
class ComputeFact:
    """Floating-point operations per second, in the fastest of a few trials."""

    speed: float


class Compute(Check[ComputeFact]):
    """Ranks compute equally fast, while all of them do."""

    name = "compute"
    about = "speed of a matrix product, with slow ranks named"
    together = True
    fact = ComputeFact

    def gather(self, here: Here) -> ComputeFact:
        accelerator = get_accelerator()
        on_device = accelerator.device_name() != "cpu"
        device = torch.device(accelerator.device_name(here.local_rank) if on_device else "cpu")
        dtype = torch.bfloat16 if on_device and accelerator.is_bf16_supported() else torch.float32
        rows = _DEVICE if on_device else _CPU
        left = torch.ones(rows, rows, dtype=dtype, device=device)
        out = torch.empty_like(left)

        def multiply() -> None:
            torch.mm(left, left, out=out)

        best = min(seconds(multiply, device, trials=1, warmups=1) for _ in range(_TRIALS))
        return ComputeFact(2 * rows**3 / best)

    def judge(self, told: Sequence[Told[ComputeFact]]) -> list[Finding]:
        slow = stragglers({each.rank: each.fact.speed for each in told})
        if not slow:
            least = min(each.fact.speed for each in told)
            return [Finding(Level.OK, f"every rank computes at {least / 1e12:.3g} TFLOP/s or more")]
        worst = min(slow.values())
        verb = "computes" if len(slow) == 1 else "compute"
        what = f"{who(among(told, slow))} {verb} at {worst:.0%} of the usual speed"
        advice = "look for other processes, heat or a power limit there; leave the host out if it stays slow"
        return [Finding(level_of(slow), what, tuple(slow), advice)]
