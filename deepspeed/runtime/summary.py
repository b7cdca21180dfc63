"""The lines about a whole run in the log: what is trained when an engine is made, and how far it came at the end."""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable
from logging import INFO
from typing import TYPE_CHECKING

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.storage.durable import gibibytes
from deepspeed.log import log_dist, logger
from deepspeed.runtime.destroyed import Destroyed
from deepspeed.runtime.held import held_tensors
from deepspeed.runtime.parts import Parts
from deepspeed.zero.parameters.sharding import numel_of

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

__all__ = ["log_start", "logs_end"]


def log_start(parts: Parts) -> None:
    """Log the model, its parameters, the ranks, stage, precision, and what this rank holds."""
    if not logger.isEnabledFor(INFO):
        return
    parameters = list(parts.module.parameters())
    count = sum(map(numel_of, parameters))
    trained = sum(numel_of(param) for param in parameters if param.requires_grad)
    sizes = {name: size for name, size in parts.layout.sizes.items() if size > 1}
    spread = ", ".join(f"{name} {size}" for name, size in sizes.items())
    whole = parts.experts is None and not sizes.keys() - {"dp", "sp"}
    held = {each.untyped_storage().data_ptr(): each for kind in held_tensors(parts).values() for each in kind}
    size = sum(each.untyped_storage().nbytes() for each in held.values())
    log_dist(
        f"{type(parts.module).__name__}: {count:,} parameters{'' if whole else ' on rank 0'}, {trained:,} trained; "
        f"{comm.get_world_size()} ranks{f' ({spread})' if spread else ''}; ZeRO stage "
        f"{int(parts.config.schema.zero_optimization.stage)}; {parts.precision.describe()}; {gibibytes(size)} held by "
        "rank 0 before the first step"
    )


def logs_end(engine: DeepSpeedEngine) -> Callable[[], None]:
    """What logs how far the engine came: called once, by `destroy` or else when the program ends."""
    began, alive = time.perf_counter(), weakref.ref(engine)

    def tell() -> None:
        atexit.unregister(tell)
        ended = alive()
        if ended is None or isinstance(ended._parts, Destroyed) or ended._parts.stepper is None:
            return
        skipped = f" ({ended.skipped_steps} skipped)" if ended.skipped_steps else ""
        peak = gibibytes(get_accelerator().max_memory_allocated())
        log_dist(
            f"{type(ended.module).__name__}: ended at step {ended.global_steps}{skipped} after "
            f"{ended.global_samples:,} samples, {time.perf_counter() - began:.1f} s after it began; peak memory {peak} "
            "on rank 0"
        )

    atexit.register(tell)
    return tell
