"""The oldest torch that this library runs on."""

from __future__ import annotations

import re

__all__ = ["OLDEST", "require"]

OLDEST = (2, 9)
"""As the distribution's requirements have it; with earlier ones what is missing would show in the middle of a job."""


def require(version: str) -> None:
    """Raise an ImportError for a version of torch that is too old; one that cannot be read is let through."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and tuple(map(int, found.groups())) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(
            f"deepspeed needs torch {oldest} or later and found {version}. Update it (pip install --upgrade "
            f'"torch>={oldest}"), or look for another installation of torch that Python finds first.'
        )
