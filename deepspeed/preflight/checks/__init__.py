"""The checks, in the order in which they are shown; those that need all ranks at once come last."""

from __future__ import annotations

from typing import Any

from deepspeed.preflight.check import PreflightCheck
from deepspeed.preflight.checks.folder import FolderCheck, SharedFolderCheck
from deepspeed.preflight.checks.machine import DevicesCheck, MemoryCheck, OffloadCheck, SharedMemoryCheck
from deepspeed.preflight.checks.plan import PlanCheck
from deepspeed.preflight.checks.software import CodeCheck, ConfigCheck, EnvironmentCheck, OpsCheck, VersionsCheck
from deepspeed.preflight.checks.speed import BandwidthCheck, ClockCheck, ComputeCheck

__all__ = ["CHECKS"]

CHECKS: tuple[PreflightCheck[Any], ...] = (
    VersionsCheck(),
    ConfigCheck(),
    CodeCheck(),
    EnvironmentCheck(),
    DevicesCheck(),
    MemoryCheck(),
    SharedMemoryCheck(),
    FolderCheck(),
    OffloadCheck(),
    PlanCheck(),
    OpsCheck(),
    ClockCheck(),
    SharedFolderCheck(),
    ComputeCheck(),
    BandwidthCheck(),
)
