"""The GPU architectures that a build targets, as `TORCH_CUDA_ARCH_LIST` spells them: "8.0;9.0a+PTX"."""

from __future__ import annotations

import re

_ENTRY = re.compile(r"\d+\.\d[a-z]?(\+PTX)?", re.IGNORECASE)

# The family names that PyTorch's own builds accept.
_FAMILIES = ("Volta", "Turing", "Ampere", "Ada", "Hopper", "Blackwell")


def check_arch_list(text: str) -> None:
    """Refuse a list, separated by `;`, `,` or spaces, with an entry that no build accepts."""
    for entry in re.split(r"[;,\s]+", text.strip()):
        if entry and entry.title() not in ("Native", *_FAMILIES) and _ENTRY.fullmatch(entry) is None:
            raise ValueError(
                f"TORCH_CUDA_ARCH_LIST: {entry!r} is not a GPU architecture; expected entries such as "
                f"8.0, 9.0a or 9.0+PTX, or one of {', '.join(_FAMILIES)}"
            )
