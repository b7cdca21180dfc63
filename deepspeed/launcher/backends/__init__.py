"""Programs that start ranks on other hosts: one file for each, which only builds its command line."""

from __future__ import annotations

__all__: list[str] = []
