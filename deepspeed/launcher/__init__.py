"""Programs that people run: the report about this machine, and later the launcher itself."""

from __future__ import annotations

__all__: list[str] = []
