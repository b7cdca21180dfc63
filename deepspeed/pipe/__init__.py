"""Pipeline parallelism: layers spread over ranks, micro-batches that follow each other through them."""

from __future__ import annotations

from deepspeed.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
