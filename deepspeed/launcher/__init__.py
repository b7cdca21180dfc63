"""Programs that people run: the launcher of a job, and the report about this machine."""

from __future__ import annotations

__all__: list[str] = []
