"""Cambricon MLUs."""

from __future__ import annotations

from deepspeed.accelerator.generic import GenericAccelerator

__all__ = ["MLU_Accelerator"]


class MLU_Accelerator(GenericAccelerator):
    """torch.mlu, which the package torch_mlu adds."""

    name = "mlu"
    backend = "cncl"
    package = "torch_mlu"
    graph_class = "MLUGraph"
    exported = ("NEUWARE_HOME", "CNCL", "LD_LIBRARY", "PATH")
    visible = ("MLU_VISIBLE_DEVICES",)
