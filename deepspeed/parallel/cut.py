"""`Cut`: what a module knows of the parts that other ranks hold of its own parameters, in the attribute `share`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from deepspeed.fragments import Split
from deepspeed.parallel.regions import Peers

__all__ = ["Cut", "cut_of"]


@dataclass
class Cut:
    """Parameters of which every rank of an axis holds a part."""

    axis: Peers
    splits: dict[str, Split]
    """How each of the module's own parameters is cut, by its name in the module."""

    def __deepcopy__(self, _: Any) -> Cut:
        return self  # groups of processes are not copied


def cut_of(module: nn.Module) -> Cut | None:
    """How a module is cut; None if all of it is here."""
    share = getattr(module, "share", None)
    return share if isinstance(share, Cut) else None
