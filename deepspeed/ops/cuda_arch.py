"""The GPU architectures that a build targets, as `TORCH_CUDA_ARCH_LIST` spells them: "8.0;9.0a+PTX"."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["CudaArch", "parse_arch_list"]

_ENTRY = re.compile(r"(?P<major>\d+)\.(?P<minor>\d)(?P<variant>[a-z]?)(?P<ptx>\+PTX)?", re.IGNORECASE)

# The family names that PyTorch's own builds accept.
_FAMILIES = {
    "volta": "7.0+PTX",
    "turing": "7.5+PTX",
    "ampere": "8.0;8.6+PTX",
    "ada": "8.9+PTX",
    "hopper": "9.0+PTX",
    "blackwell": "10.0;10.3;12.0;12.1+PTX",
}


@dataclass(frozen=True, slots=True, order=True)
class CudaArch:
    """One target; `variant` is the letter of code for exactly this chip ("9.0a") or this family ("10.0f")."""

    major: int
    minor: int
    variant: str = ""
    ptx: bool = False

    @property
    def sm(self) -> str:
        """The name that nvcc gives to it: `sm_90a`."""
        return f"sm_{self.major}{self.minor}{self.variant}"

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}{self.variant}{'+PTX' if self.ptx else ''}"


def parse_arch_list(text: str) -> tuple[CudaArch, ...]:
    """Read a list separated by `;`, `,` or spaces; empty or "native" gives none: whatever GPUs are there."""
    words = [word for word in re.split(r"[;,\s]+", text.strip()) if word and word.lower() != "native"]
    entries = [entry for word in words for entry in _FAMILIES.get(word.lower(), word).split(";")]
    archs: dict[CudaArch, None] = {}
    for entry in entries:
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise ValueError(
                f"TORCH_CUDA_ARCH_LIST: {entry!r} is not a GPU architecture; expected entries such as "
                f"8.0, 9.0a or 9.0+PTX, or one of {', '.join(name.title() for name in _FAMILIES)}"
            )
        major, minor = int(match["major"]), int(match["minor"])
        archs[CudaArch(major, minor, match["variant"].lower(), match["ptx"] is not None)] = None
    return tuple(archs)
