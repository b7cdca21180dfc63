"""`ds_bench`: how fast ranks exchange bytes; the preflight measures with the same parts."""

from __future__ import annotations

__all__: list[str] = []
