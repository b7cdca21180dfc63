"""`SubparamShape`: how several parameters lie in one, which models say in their universal checkpoint rules."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed._lazy import lazy

__all__ = ["SubparamShape"]

# What puts such a checkpoint into a parameter knows who shards it, and so lives above.
_ABOVE = "deepspeed._compat.universal_params"
__getattr__ = lazy(__name__, {n: f"{_ABOVE}:{n}" for n in ("enable_universal_checkpoint", "load_hp_checkpoint_state")})


@dataclass
class SubparamShape:
    """A parameter that is several: `shape` has a tuple of their sizes in place of `partition_dim`."""

    patterns: list[str]
    shape: tuple[tuple[int, ...] | int, ...]
    partition_dim: int
