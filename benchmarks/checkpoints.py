"""What the cases of checkpoints share: the model, its engine, a cold page cache and the peak of memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["SHAPE", "engine_of", "forget", "peak_of"]

SHAPE = {"layers": 6, "width": 1024, "heads": 8, "vocabulary": 8192, "length": 64}
"""A GPT of 84M parameters."""


def engine_of(model: Any, stage: Any, section: Mapping[str, object]) -> Any:
    """The contender's own engine after its first step, so that there are moments."""
    import importlib

    import torch

    deepspeed = importlib.import_module("deepspeed")
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "steps_per_print": 10**9,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            **({"checkpoint": dict(section)} if section else {}),
        },
    )
    tokens = torch.randint(SHAPE["vocabulary"], (1, 16))
    engine.backward(engine(tokens, tokens))
    engine.step()
    return engine


def forget(folder: Path) -> None:
    """Drop the files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def peak_of(act: Callable[[], object]) -> float:
    """MiB of resident memory that an act needs at its peak, beyond what there was before."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    act()
    return (_status("VmHWM") - before) / 1024


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))
