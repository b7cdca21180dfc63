"""What a job needs, before it runs: memory, bytes on links, time and changes that fit."""

from __future__ import annotations

from deepspeed.planning.ceilings import DeviceCeilings as DeviceCeilings
from deepspeed.planning.planner import Plan as Plan
from deepspeed.planning.planner import plan as plan

__all__ = ["DeviceCeilings", "Plan", "plan"]
