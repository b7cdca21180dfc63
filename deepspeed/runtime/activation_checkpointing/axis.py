"""The model-parallel axis that saved inputs are sharded over, from an mpu or from a layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch.distributed import ProcessGroup

from deepspeed.errors import LayoutError
from deepspeed.parallel.layout import ParallelLayout

__all__ = ["ALONE", "ModelAxis", "model_axis"]

# The X of get_X_parallel_{world_size,rank,group}; the "model" of a pipeline grid spans its stages, so it comes last.
_SPELLINGS = ("tensor_model", "slice", "model")


class ModelAxis(Protocol):
    """Ranks that compute with the same activations."""

    @property
    def size(self) -> int:
        """Ranks on it."""

    @property
    def rank(self) -> int:
        """This process's place on it."""

    @property
    def group(self) -> ProcessGroup:
        """Its process group."""


@dataclass(frozen=True, slots=True)
class _MpuAxis:
    mpu: Any
    spelling: str
    size: int
    rank: int

    @property
    def group(self) -> ProcessGroup:
        group = getattr(self.mpu, f"get_{self.spelling}_parallel_group")()
        if not isinstance(group, ProcessGroup) or group.size() != self.size:
            found = f"{group.size()} ranks" if isinstance(group, ProcessGroup) else f"a {type(group).__name__}"
            raise LayoutError(
                f"the mpu's get_{self.spelling}_parallel_group() gave {found}; expected a process group of "
                f"{self.size} ranks, as get_{self.spelling}_parallel_world_size() says. Correct the mpu."
            )
        return group


@dataclass(frozen=True, slots=True)
class _Alone:
    size: int = 1
    rank: int = 0

    @property
    def group(self) -> ProcessGroup:
        raise LayoutError(
            "there is no model-parallel group: no mpu was given to deepspeed.checkpointing.configure, and no engine "
            "with tensor parallelism exists. Give an mpu."
        )


ALONE: ModelAxis = _Alone()


def model_axis(source: Any) -> ModelAxis:
    """The tensor-parallel axis of a layout or of an mpu; an mpu without one says its whole model-parallel group."""
    if isinstance(source, ParallelLayout):
        source.create_groups("tp")  # by all ranks together now, since later only some may run checkpointed calls
        return source["tp"]
    for spelling in _SPELLINGS:
        size = getattr(source, f"get_{spelling}_parallel_world_size", None)
        rank = getattr(source, f"get_{spelling}_parallel_rank", None)
        if size is not None and rank is not None:
            return _MpuAxis(source, spelling, int(size()), int(rank()))
    wanted = ", ".join(f"get_{spelling}_parallel_world_size" for spelling in _SPELLINGS)
    raise LayoutError(
        f"the mpu, a {type(source).__name__}, has none of {wanted} with the rank method beside it. "
        "Give it the methods of one of them, or give None for no model parallelism."
    )
