"""Keys that were renamed or taken away: one table, applied to the raw config before anything is validated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Raw = dict[str, Any]


def _to_cpu(value: Any) -> Any:
    return {"device": "cpu"} if value is True else None


@dataclass(frozen=True)
class Renamed:
    """`old` moves to `new` (both dotted); `convert` may return None for "nothing to set"."""

    old: str
    new: str
    convert: Callable[[Any], Any] = lambda value: value
    warns: bool = True
    """Warn that the old name was used; False where clients write it without the user's doing."""
    newer_wins: bool = False
    """Both given: keep the new one. Otherwise both given is an error."""


_ZERO = "zero_optimization"

RENAMED: tuple[Renamed, ...] = (
    Renamed("bfloat16", "bf16", newer_wins=True),
    Renamed("use_data_before_expert_parallel_", "use_data_before_expert_parallelism"),
    Renamed(f"{_ZERO}.cpu_offload", f"{_ZERO}.offload_optimizer", _to_cpu),
    Renamed(f"{_ZERO}.cpu_offload_param", f"{_ZERO}.offload_param", _to_cpu),
    Renamed(f"{_ZERO}.cpu_offload_use_pin_memory", f"{_ZERO}.offload_optimizer.pin_memory"),
    Renamed(f"{_ZERO}.stage3_gather_fp16_weights_on_model_save", f"{_ZERO}.stage3_gather_16bit_weights_on_model_save"),
    Renamed("bf16.check_overflow", "bf16.check_grad_overflow"),
    Renamed("aio.thread_count", "aio.intra_op_parallelism", warns=False),
    Renamed("quantize_training.eigenvalue", "eigenvalue", warns=False),
    Renamed("elasticity.prefer_large_batch", "elasticity.prefer_larger_batch"),
    Renamed("autotuning.start_step", "autotuning.start_profile_step"),
    Renamed("autotuning.end_step", "autotuning.end_profile_step"),
)

REMOVED: dict[str, str] = {
    "zero": "the section is called 'zero_optimization'",
    "monitor_config": "write 'tensorboard', 'wandb', 'comet' and 'csv_monitor' at the top level, without a wrapper",
    f"{_ZERO}.grad_hooks": "gradients are always reduced from hooks; remove the key",
    "compile.enabled": "nothing is compiled until the script calls engine.compile(); remove the key",
    "compile.backend": "pass it to engine.compile(backend=...); remove the key",
    "optimizer.params.max_grad_norm": "set 'gradient_clipping' at the top level instead",
}


def apply(raw: Raw) -> tuple[list[Renamed], list[tuple[str, str]]]:
    """Move every old key in `raw` (changed in place) to its new name; return what was done and what is wrong."""
    done: list[Renamed] = []
    wrong: list[tuple[str, str]] = []
    _boolean_zero(raw, done)
    for row in RENAMED:
        section, key = _find(raw, row.old)
        if section is None or key not in section:
            continue
        value = section.pop(key)
        target, name = _find(raw, row.new, create=True)
        if target is None:
            wrong.append((row.old, f"it is now {row.new!r}, whose parent is not an object here"))
            continue
        converted = row.convert(value)
        if converted is None:
            continue
        if target.get(name) is not None:
            if not row.newer_wins:
                wrong.append((row.old, f"it is the old name of {row.new!r}, which is given too; keep the new one"))
            continue
        target[name] = converted
        done.append(row)
    return done, wrong


def current(section: str, values: Raw) -> Raw:
    """The values of a section that is built by itself, under today's names; a ValueError where that cannot be."""
    raw: Raw = {section: {key: dict(value) if isinstance(value, dict) else value for key, value in values.items()}}
    _, wrong = apply(raw)
    if wrong:
        raise ValueError("; ".join(f"{old}: {reason}" for old, reason in wrong))
    moved: Raw = raw[section]
    return moved


def _boolean_zero(raw: Raw, done: list[Renamed]) -> None:
    """`"zero_optimization": true` once meant stage 1 with a top-level `allgather_size`."""
    value = raw.get(_ZERO)
    if not isinstance(value, bool):
        return
    raw[_ZERO] = {"stage": int(value)}
    if value and raw.get("allgather_size") is not None:
        raw[_ZERO]["allgather_bucket_size"] = raw.pop("allgather_size")
        done.append(Renamed("allgather_size", f"{_ZERO}.allgather_bucket_size", warns=False))
    done.append(Renamed(f"{_ZERO}: {str(value).lower()}", f"{_ZERO}.stage"))


def _find(raw: Raw, path: str, *, create: bool = False) -> tuple[Raw | None, str]:
    """The object that holds the last part of a dotted path, or None if there is none on the way."""
    *parents, key = path.split(".")
    here: Any = raw
    for parent in parents:
        if create and isinstance(here, dict) and here.get(parent) is None:
            here[parent] = {}
        here = here.get(parent) if isinstance(here, dict) else None
    return (here if isinstance(here, dict) else None), key
