"""The launchers of several hosts under the path by which DeepSpeed's users import them."""

from __future__ import annotations

from deepspeed.launcher.backends.base import MultiNodeRunner
from deepspeed.launcher.backends.hydra import IMPIRunner, MPICHRunner, MVAPICHRunner
from deepspeed.launcher.backends.openmpi import OpenMPIRunner
from deepspeed.launcher.backends.pdsh import PDSHRunner
from deepspeed.launcher.backends.slurm import SlurmRunner

__all__ = [
    "IMPIRunner",
    "MPICHRunner",
    "MVAPICHRunner",
    "MultiNodeRunner",
    "OpenMPIRunner",
    "PDSHRunner",
    "SlurmRunner",
]
