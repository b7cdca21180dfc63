"""Tecorigin SDAA devices."""

from __future__ import annotations

from deepspeed.accelerator.generic import GenericAccelerator

__all__ = ["SDAA_Accelerator"]


class SDAA_Accelerator(GenericAccelerator):
    """torch.sdaa, which the package torch_sdaa adds."""

    name = "sdaa"
    backend = "tccl"
    package = "torch_sdaa"
    exported = ("TCCL", "LD_LIBRARY", "PATH")
    visible = ("SDAA_VISIBLE_DEVICES",)
