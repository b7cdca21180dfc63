"""The offload blocks of `zero_optimization`: what leaves the device, where to, and through which buffers."""

from __future__ import annotations

from enum import Enum

from pydantic import Field, model_validator

from .model import Count, Elements, Section, Share
from .values import Folder

__all__ = [
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
]


class OffloadDeviceEnum(str, Enum):
    """Where offloaded state lives."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """The kinds of state that `engine.offload_states` can move."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class _Offload(Section):
    """What both offload blocks have in common."""

    device: OffloadDeviceEnum = Field(
        OffloadDeviceEnum.none, description="Where the state lives: none (the accelerator), cpu or nvme."
    )
    nvme_path: Folder = Field(
        None, description="Folder on a local NVMe disk for the swap files; required with device nvme."
    )
    pin_memory: bool = Field(
        True, description="Whether host buffers are page-locked, for faster copies to and from the device."
    )

    @model_validator(mode="after")
    def _has_path(self) -> _Offload:
        if self.device is OffloadDeviceEnum.nvme and self.nvme_path is None:
            raise ValueError(
                'device is "nvme" but nvme_path is not given or empty; set nvme_path to a folder on a local disk, '
                'or device to "cpu"'
            )
        return self


class DeepSpeedZeroOffloadParamConfig(_Offload):
    """Parameter offload; it takes effect at ZeRO stage 3."""

    buffer_count: Count = Field(5, description="Number of host buffers through which parameters pass to NVMe.")
    buffer_size: Elements = Field(100_000_000, description="Size of each of these buffers, in elements.")
    max_in_cpu: Elements = Field(
        1_000_000_000, description="Number of parameter elements kept in host memory when the rest is on NVMe."
    )


class DeepSpeedZeroOffloadOptimizerConfig(_Offload):
    """Optimizer state offload; the step then runs on the CPU. NVMe needs ZeRO stage 3."""

    buffer_count: Count = Field(
        4,
        description="Number of host buffers for NVMe; at least one per optimizer state and one for the gradient.",
    )
    pipeline_read: bool = Field(
        False, description="Whether the next tile is read from NVMe while the current one is updated."
    )
    pipeline_write: bool = Field(
        False, description="Whether the previous tile is written to NVMe while the current one is updated."
    )
    fast_init: bool = Field(False, description="Whether the state files on NVMe are initialised the fast way.")
    ratio: Share = Field(
        1.0, description="Share of the optimizer state stepped on the CPU (0 to 1); below 1 needs ZeRO stage 3."
    )
    super_offload: bool = Field(
        False, description="Whether a separate CPU worker steps asynchronously (SuperOffload; stage 3 on CUDA)."
    )
    cpuadam_cores_perc: Share = Field(
        0.8, description="Share of the CPU cores given to that worker (0 to 1); used with super_offload only."
    )

    @property
    def pipeline(self) -> bool:
        """Whether reading or writing overlaps with the update."""
        return self.pipeline_read or self.pipeline_write
