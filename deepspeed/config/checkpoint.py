"""The `checkpoint` section: how checkpoints are written and read."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Gt

from .model import Lower, NoEffect, PositiveCount, Section, Upper, key, no_effect

PositiveSeconds = Annotated[float, Gt(0.0)]
"""A time above zero."""


class ParallelWriteConfig(Section):
    """Which files several ranks write together."""

    pipeline_stage: bool = key(
        False, "Whether the layer files of a pipeline stage are spread over its data-parallel ranks."
    )


class CheckpointWriterConfig(Section):
    """The fast checkpoint writer; the presence of the block switches it on."""

    type: Annotated[Literal["FAST", "PYTHON", "MOCK"], Upper] = key(
        "FAST", "File writer: FAST (asynchronous I/O), PYTHON (plain files) or MOCK (writes nothing)."
    )
    io_buffer_size: PositiveCount = key(67_108_864, "Size of the write buffer, in bytes.")
    io_buffer_double: bool = key(True, "Whether a second buffer is filled while the first is written.")
    io_multiplier: PositiveCount = key(1, "Factor on the number of writers.")
    show_statistics: bool = key(False, "Whether the write speed is logged.")
    data_parallel: Annotated[Literal["replica", "socket", "machine"], Lower] | None = no_effect(
        None, "which rank writes what follows from the ZeRO stage"
    )
    decoupled: bool = key(False, "Whether writing goes on in a background process.")


class CheckpointConfig(Section):
    """Saving and loading of checkpoints."""

    tag_validation: Annotated[Literal["IGNORE", "WARN", "FAIL"], Upper] = key(
        "WARN", "What happens when ranks save under different tags: IGNORE, WARN or FAIL (any case)."
    )
    format: Annotated[Literal["deepspeed", "safetensors"], Lower] = key(
        "deepspeed",
        "Layout of the files: deepspeed (those of DeepSpeed) or safetensors (fragments with a JSON index, the "
        "fastest). Both load on any number of ranks and at any stage.",
    )
    keep_last: PositiveCount | None = key(
        None, "Number of checkpoints that stay in a folder; older ones are removed. null keeps all."
    )
    rank_wait: PositiveSeconds = key(
        10.0,
        "Seconds after which ranks that saving waits for are given up: those that do not answer, and those that went "
        "on with something else. Ranks that are merely busy are waited for.",
    )
    load_universal: bool = key(False, "Whether checkpoints are loaded from the universal format.")
    use_node_local_storage: bool = key(
        False, "Whether every node writes its own copy, for folders that nodes do not share."
    )
    parallel_write: ParallelWriteConfig = key(
        ParallelWriteConfig,
        "Which files several ranks write together.",
        NoEffect("every file is written by one rank, and different ranks write at the same time"),
    )
    checkpoint_serialization: bool = key(True, "Whether torch.save uses its zip format; false is its older format.")
    writer: CheckpointWriterConfig | None = key(None, "The fast writer; the block, even empty, switches it on.")
