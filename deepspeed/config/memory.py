"""The `memory`, `aio` and `activation_checkpointing` sections; and sizes as people write them."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any, ClassVar

from annotated_types import Ge
from pydantic import BeforeValidator, WithJsonSchema, model_validator

from .model import Count, Folder, NoEffect, NotBuilt, PositiveCount, Section, key

_PREFIXES = "KMGTP"
_UNITS = {
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate(_PREFIXES, 1)},
    **{f"{letter}IB": 1024**power for power, letter in enumerate(_PREFIXES, 1)},
}
_TEXT = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z]+)", re.ASCII)
_EXPECTED = 'bytes as a whole number, or a size with its unit such as "70GB" or "64GiB"'


def read_size(value: Any) -> int:
    """Bytes, from a whole number of them or from text: KB, MB, GB, TB and PB count by 1000, KiB to PiB by 1024."""
    if isinstance(value, str):
        found = _TEXT.fullmatch(value.strip())
        unit = _UNITS.get(found[2].upper()) if found else None
        if found is None or unit is None:
            raise ValueError(f"expected {_EXPECTED}, found {value!r}")
        return int(Decimal(found[1]) * unit)
    whole = not isinstance(value, bool) and isinstance(value, (int, float)) and value == value // 1
    if not whole or value < 0:
        raise ValueError(f"expected {_EXPECTED}, found {value!r}")
    return int(value)


def size_text(nbytes: int) -> str:
    """A size for a reader, in units of 1000."""
    power = min((len(str(nbytes)) - 1) // 3, len(_PREFIXES))
    return f"{nbytes / 1000**power:.2f} {_PREFIXES[power - 1]}B" if power else f"{nbytes} B"


Bytes = Annotated[
    int,
    BeforeValidator(read_size),
    Ge(0),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": r"^\s*[0-9]"}]}),
]
"""A number of bytes, or text that says one."""


_WITHOUT_LIMIT = NoEffect(
    "memory.device is not given, so that all states are on the device", lambda c: c.memory.device is None
)


class MemoryConfig(Section):
    """Budgets of the tiers that hold masters, moments, gradients and sharded parameters: the fastest is filled first.

    A size is a whole number of bytes or text such as "70GB" (1000³) or "64GiB" (1024³).
    """

    device: Bytes | None = key(None, "Bytes of every rank's device that model states may take; null is no limit.")
    host: Bytes | None = key(
        None, "Bytes of a machine's memory for them, which its ranks share equally; null is no limit.", _WITHOUT_LIMIT
    )
    disk: Bytes | None = key(
        None, "Bytes of a machine's disk for them, shared likewise; null is no disk. It needs path.", _WITHOUT_LIMIT
    )
    path: Folder = key(None, "Folder on a local disk for what disk holds; needed with disk.", _WITHOUT_LIMIT)

    @model_validator(mode="after")
    def _disk_has_a_path(self) -> MemoryConfig:
        if self.disk and self.path is None:
            raise ValueError(
                f"disk is {size_text(self.disk)} but path is not given or empty; set path to a folder on that disk"
            )
        if self.path is not None and self.disk is None:
            raise ValueError(f"path is {str(self.path)!r} but disk is not given; set disk to what may be used there")
        return self


class AioConfig(Section):
    """Asynchronous file access, for NVMe offload and the fast checkpoint writer."""

    renamed_under: ClassVar[str | None] = "aio"

    block_size: PositiveCount = key(1_048_576, "Size of one read or write request, in bytes.")
    queue_depth: PositiveCount = key(8, "Number of requests in flight at a time.")
    intra_op_parallelism: PositiveCount = key(1, "Number of threads that share one read or write.")
    single_submit: bool = key(False, "Whether requests are submitted one by one, not in batches.")
    overlap_events: bool = key(True, "Whether new requests are submitted before the earlier ones are finished.")
    use_gds: bool = key(
        False, "Whether data goes straight between disk and GPU memory (CUDA only).", NotBuilt("GPUDirect Storage")
    )


class ActivationCheckpointingConfig(Section):
    """Defaults of `deepspeed.checkpointing.configure`; arguments of that call take precedence."""

    partition_activations: bool = key(False, "Whether saved inputs are sharded over the model-parallel ranks.")
    cpu_checkpointing: bool = key(
        False, "Whether saved inputs wait in host memory, copied there and back concurrently with computation."
    )
    contiguous_memory_optimization: bool = key(
        False, "Whether all saved inputs share one buffer; needs partition_activations and number_checkpoints."
    )
    number_checkpoints: PositiveCount | None = key(
        None, "Number of checkpointed calls in one forward pass, which gives that buffer its size."
    )
    synchronize_checkpoint_boundary: bool = key(
        False, "Whether the device is synchronised at the start and end of each checkpointed call."
    )
    keep_last_count: Count = key(
        1,
        "Newest saved inputs that stay on the device with cpu_checkpointing; backward begins with them.",
        NoEffect(
            "activation_checkpointing.cpu_checkpointing is off",
            lambda c: not c.activation_checkpointing.cpu_checkpointing,
        ),
    )
    layers_per_checkpoint: PositiveCount = key(
        1,
        "Layers of Transformers in a row of which only the first one's input is saved; backward computes the others' "
        "from it.",
    )
    profile: bool = key(False, "Whether the time of each checkpointed call is measured.")
