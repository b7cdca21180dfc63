"""Version facts; the build reads `__version__` from here."""

from __future__ import annotations

__version__ = "0.20.0"
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in __version__.split("."))
__git_hash__: str | None = None
__git_branch__: str | None = None
