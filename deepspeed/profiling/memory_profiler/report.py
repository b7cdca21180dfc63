"""A peak as people read it."""

from __future__ import annotations

from deepspeed.profiling.memory_profiler.profiler import MemoryPeak

__all__ = ["lines"]


def lines(peak: MemoryPeak, top: int) -> list[str]:
    """Where it was, a line for each kind, and the `top` modules whose activations were alive."""
    where = "" if peak.module is None else f", module {peak.module or 'the model'} ({peak.module_type})"
    doing = f", operation {peak.operation}" if peak.operation else ""
    shown = [f"{_size(peak.total)}         on {peak.device} in {peak.phase}{where}{doing}"]
    shown += [f"{_size(nbytes)}  {_share(nbytes, peak):>5}  {kind}" for kind, nbytes in peak.kinds.items()]
    if peak.activations:
        shown.append("Activations that were alive, by the module that made them:")
        shown += [f"{_size(nbytes)}  {name or 'the model'}" for name, nbytes in list(peak.activations.items())[:top]]
        left = list(peak.activations.values())[top:]
        if left:
            shown.append(f"{_size(sum(left))}  {len(left)} more")
    return shown


def _size(nbytes: int) -> str:
    unit, size = next((pair for pair in (("GiB", 2**30), ("MiB", 2**20)) if nbytes >= pair[1]), ("KiB", 2**10))
    return f"{nbytes / size:9.2f} {unit}"


def _share(nbytes: int, peak: MemoryPeak) -> str:
    return f"{nbytes / max(peak.total, 1):.0%}"
