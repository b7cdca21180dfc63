"""The gradient norm of a model whose layers lie on different ranks."""

from __future__ import annotations

from dataclasses import replace

from deepspeed.parallel import ParallelLayout
from deepspeed.pipe.module import PipelineModule
from deepspeed.zero.states.norm import Measure

__all__ = ["over_stages"]


def over_stages(measure: Measure, module: PipelineModule, layout: ParallelLayout) -> Measure:
    """Sum over stages, each tied weight once; over tensor slices only what is split."""
    slices, stages = layout["tp"], layout["pp"]
    return replace(
        measure,
        model_group=slices.group if slices.size > 1 else None,
        stages=stages.group if stages.size > 1 else None,
        elsewhere=measure.elsewhere | frozenset(module.ties.counted_elsewhere()),
    )
