"""The sequence-parallel ranks of the process, as functions without a handle; the module itself is an mpu.

It tells no data-parallel size: whoever takes it as an mpu finds that all ranks that are not sequence-parallel are
data-parallel.
"""

from __future__ import annotations

from torch.distributed import ProcessGroup

from deepspeed.errors import LayoutError
from deepspeed.parallel import ParallelLayout
from deepspeed.parallel.axes import SAMPLE_AXES
from deepspeed.parallel.mpu import current_layout

__all__ = [
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_sequence_data_parallel_group",
    "get_sequence_data_parallel_rank",
    "get_sequence_data_parallel_world_size",
    "get_sequence_parallel_group",
    "get_sequence_parallel_rank",
    "get_sequence_parallel_world_size",
    "initialize_sequence_parallel",
]


class _Slot:
    """The layout that a script asked for."""

    layout: ParallelLayout | None = None


_slot = _Slot()


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Make groups of that many neighbouring ranks, which share sequences; all ranks call this together."""
    current = _slot.layout
    if current is not None and current.table.alive and current.sequence.size == sequence_parallel_size:
        return
    layout = ParallelLayout.build(sp=sequence_parallel_size)
    layout.create_groups("sp", SAMPLE_AXES)
    _slot.layout = current_layout.keep(layout)
    current_layout.set(layout)


def get_sequence_parallel_group() -> ProcessGroup:
    """The ranks that share each sequence with this one."""
    return _layout().sequence.group


def get_sequence_parallel_rank() -> int:
    return _layout().sequence.rank


def get_sequence_parallel_world_size() -> int:
    return _layout().sequence.size


def get_sequence_data_parallel_group() -> ProcessGroup:
    """The ranks over which gradients are averaged."""
    return _layout().samples.group


def get_sequence_data_parallel_rank() -> int:
    return _layout().samples.rank


def get_sequence_data_parallel_world_size() -> int:
    return _layout().samples.size


def get_model_parallel_group() -> ProcessGroup:
    """The ranks that hold one copy of the model together: this one alone."""
    return _layout().model.group


def get_model_parallel_rank() -> int:
    return _layout().model.rank


def get_model_parallel_world_size() -> int:
    return _layout().model.size


def _layout() -> ParallelLayout:
    layout = _slot.layout
    if layout is None or not layout.table.alive:
        raise LayoutError(
            "there are no sequence-parallel groups yet. Call initialize_sequence_parallel(size) or "
            "UlyssesSPAttentionHF.register_with_transformers(...) first."
        )
    return layout
