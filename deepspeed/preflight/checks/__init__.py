"""The checks, in the order in which they are shown; those that need all ranks at once come last."""

from __future__ import annotations

from typing import Any

from deepspeed.preflight.check import Check
from deepspeed.preflight.checks.bandwidth import Bandwidth
from deepspeed.preflight.checks.clock import Clock
from deepspeed.preflight.checks.code import Code
from deepspeed.preflight.checks.compute import Compute
from deepspeed.preflight.checks.config import Config
from deepspeed.preflight.checks.devices import Devices
from deepspeed.preflight.checks.environment import Environment
from deepspeed.preflight.checks.folder import Folder
from deepspeed.preflight.checks.memory import Memory
from deepspeed.preflight.checks.offload import Offload
from deepspeed.preflight.checks.ops import Ops
from deepspeed.preflight.checks.shared_folder import SharedFolder
from deepspeed.preflight.checks.shared_memory import SharedMemoryCheck
from deepspeed.preflight.checks.versions import Versions

__all__ = ["CHECKS"]

CHECKS: tuple[Check[Any], ...] = (
    Versions(),
    Config(),
    Code(),
    Environment(),
    Devices(),
    Memory(),
    SharedMemoryCheck(),
    Folder(),
    Offload(),
    Ops(),
    Clock(),
    SharedFolder(),
    Compute(),
    Bandwidth(),
)
