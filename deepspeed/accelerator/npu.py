"""Huawei Ascend NPUs."""

from __future__ import annotations

from deepspeed.accelerator.generic import GenericAccelerator

__all__ = ["NPU_Accelerator"]


class NPU_Accelerator(GenericAccelerator):
    """torch.npu, which the package torch_npu adds."""

    name = "npu"
    backend = "hccl"
    package = "torch_npu"
    graph_class = "NPUGraph"
    exported = ("ASCEND", "HCCL", "LD_LIBRARY", "PATH")
    visible = ("ASCEND_RT_VISIBLE_DEVICES",)
