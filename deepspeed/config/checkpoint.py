"""The `checkpoint` section: how checkpoints are written and read."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Gt
from pydantic import Field

from .model import PositiveCount, Section
from .values import Lower, Upper

__all__ = [
    "CheckpointConfig",
    "CheckpointWriterConfig",
    "ParallelWriteConfig",
]


PositiveSeconds = Annotated[float, Gt(0.0)]
"""A time above zero."""


class ParallelWriteConfig(Section):
    """Which files several ranks write together."""

    pipeline_stage: bool = Field(
        False, description="Whether the layer files of a pipeline stage are spread over its data-parallel ranks."
    )


class CheckpointWriterConfig(Section):
    """The fast checkpoint writer; the presence of the block switches it on."""

    type: Annotated[Literal["FAST", "PYTHON", "MOCK"], Upper] = Field(
        "FAST", description="File writer: FAST (asynchronous I/O), PYTHON (plain files) or MOCK (writes nothing)."
    )
    io_buffer_size: PositiveCount = Field(67_108_864, description="Size of the write buffer, in bytes.")
    io_buffer_double: bool = Field(True, description="Whether a second buffer is filled while the first is written.")
    io_multiplier: PositiveCount = Field(1, description="Factor on the number of writers.")
    show_statistics: bool = Field(False, description="Whether the write speed is logged.")
    data_parallel: Annotated[Literal["replica", "socket", "machine"], Lower] | None = Field(
        None, description="Over which data-parallel ranks the writing is spread: replica, socket or machine."
    )
    decoupled: bool = Field(False, description="Whether writing goes on in a background process.")


class CheckpointConfig(Section):
    """Saving and loading of checkpoints."""

    tag_validation: Annotated[Literal["IGNORE", "WARN", "FAIL"], Upper] = Field(
        "WARN", description="What happens when ranks save under different tags: IGNORE, WARN or FAIL (any case)."
    )
    format: Annotated[Literal["deepspeed", "safetensors"], Lower] = Field(
        "deepspeed",
        description="Layout of the files: deepspeed (those of DeepSpeed) or safetensors (fragments with a JSON index, "
        "the fastest). Both load on any number of ranks and at any stage.",
    )
    keep_last: PositiveCount | None = Field(
        None, description="Number of checkpoints that stay in a folder; older ones are removed. null keeps all."
    )
    rank_wait: PositiveSeconds = Field(
        10.0,
        description="Seconds after which ranks that saving waits for are given up: those that do not answer, and those "
        "that went on with something else. Ranks that are merely busy are waited for.",
    )
    load_universal: bool = Field(False, description="Whether checkpoints are loaded from the universal format.")
    use_node_local_storage: bool = Field(
        False, description="Whether every node writes its own copy, for folders that nodes do not share."
    )
    parallel_write: ParallelWriteConfig = Field(
        default_factory=ParallelWriteConfig, description="Which files several ranks write together."
    )
    checkpoint_serialization: bool = Field(
        True, description="Whether torch.save uses its zip format; false is its older format."
    )
    writer: CheckpointWriterConfig | None = Field(
        None, description="The fast writer; the block, even empty, switches it on."
    )
