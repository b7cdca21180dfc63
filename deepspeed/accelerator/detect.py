"""Which accelerator this process uses: DS_ACCELERATOR, else the first kind that is there.

Third parties register theirs as an entry point of the group `deepspeed.accelerators`: its name is the device's,
its value a class or a function without arguments that gives a `DeepSpeedAccelerator`.
"""

from __future__ import annotations

import difflib
import importlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepspeed.accelerator.interface import DeepSpeedAccelerator, UnknownNameError
from deepspeed.errors import AcceleratorError
from deepspeed.log import logger

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

VARIABLE = "DS_ACCELERATOR"
ENTRY_POINTS = "deepspeed.accelerators"

# In the order in which they are tried; cpu is what remains.
BUILT_IN = {
    "xpu": "XPU_Accelerator",
    "npu": "NPU_Accelerator",
    "sdaa": "SDAA_Accelerator",
    "mps": "MPS_Accelerator",
    "hpu": "HPU_Accelerator",
    "mlu": "MLU_Accelerator",
    "cuda": "CUDA_Accelerator",
    "cpu": "CPU_Accelerator",
}
_FROM_VENDORS = ("supa", "klxpu")  # names with a meaning to users, whose classes their vendors have to bring

# What foreign code plausibly fails with; anything else is worth a traceback.
_PLUGIN_ERRORS = (ImportError, AttributeError, OSError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class AcceleratorFinding:
    """One kind of accelerator, and why it cannot be used here; no reason means that it can."""

    name: str
    reason: str | None = None

    @property
    def available(self) -> bool:
        """True if it can be used here."""
        return self.reason is None


def find_accelerator() -> DeepSpeedAccelerator:
    """The accelerator for this process; a wish in DS_ACCELERATOR that cannot be met is an error that says why."""
    wanted = os.environ.get(VARIABLE, "").strip().lower()
    if wanted:
        chosen = _named(wanted)
        logger.info("accelerator: %s (asked for by %s)", wanted, VARIABLE)
        return chosen
    for name in BUILT_IN:
        home = _built_in(name)
        if name != "cpu" and home.why_unavailable() is None:
            logger.info("accelerator: %s (detected)", name)
            return home()
    plugin = _first_plugin()
    if plugin is not None:
        return plugin
    logger.info("accelerator: cpu (nothing else was found)")
    return _built_in("cpu")()


def survey() -> tuple[AcceleratorFinding, ...]:
    """Every kind of accelerator, built in or registered, with the reason where it cannot be used here."""
    findings = {name: AcceleratorFinding(name, _built_in(name).why_unavailable()) for name in BUILT_IN}
    for name in _FROM_VENDORS:
        findings[name] = AcceleratorFinding(
            name, f"no class built in, and no installed package registers one as {ENTRY_POINTS}"
        )
    for point in _plugins():
        if not (point.name in findings and findings[point.name].available):
            findings[point.name] = AcceleratorFinding(point.name, _try(point)[1])
    return tuple(findings.values())


def known_names() -> tuple[str, ...]:
    """All names that DS_ACCELERATOR may hold on this machine; loads no third-party code."""
    return tuple(dict.fromkeys((*BUILT_IN, *_FROM_VENDORS, *(point.name for point in _plugins()))))


def _built_in(name: str) -> type[DeepSpeedAccelerator]:
    module = name if name in ("cpu", "cuda") else "vendors"
    found = importlib.import_module(f"deepspeed.accelerator.{module}")
    home: type[DeepSpeedAccelerator] = getattr(found, BUILT_IN[name])
    return home


def _named(name: str) -> DeepSpeedAccelerator:
    if name in BUILT_IN and _built_in(name).why_unavailable() is None:
        return _built_in(name)()
    for point in _plugins():
        if point.name == name:
            accelerator, _ = _try(point)
            if accelerator is not None:
                return accelerator
    raise UnknownNameError(_explain(name))


def _plugins() -> list[EntryPoint]:
    from importlib.metadata import entry_points  # slow to import, and seldom needed

    return sorted(entry_points(group=ENTRY_POINTS), key=lambda point: (point.name, point.value))


def _try(point: EntryPoint) -> tuple[DeepSpeedAccelerator | None, str | None]:
    """The entry point's accelerator, or None and the reason."""
    try:
        made = point.load()()
        if not isinstance(made, DeepSpeedAccelerator):
            raise AcceleratorError(f"it gave a {type(made).__name__}, not a DeepSpeedAccelerator")
        if made.is_available():
            return made, None
        return None, f"the accelerator of entry point {point.value} finds no usable device"
    except _PLUGIN_ERRORS as error:
        return None, f"entry point {point.value} is broken: {type(error).__name__}: {error}"


def _first_plugin() -> DeepSpeedAccelerator | None:
    for point in _plugins():
        if point.name == "cpu":
            continue  # the built-in one is always there
        accelerator, reason = _try(point)
        if accelerator is not None:
            logger.info("accelerator: %s (entry point %s)", point.name, point.value)
            return accelerator
        logger.warning("accelerator %s is not used: %s", point.name, reason)
    return None


def _explain(name: str) -> str:
    findings = survey()
    found = [finding.name for finding in findings if finding.available]
    names = [finding.name for finding in findings]
    if name in names:
        told = f"{VARIABLE}={name!r} cannot be used on this machine"
    else:
        near = difflib.get_close_matches(name, names, n=1)
        told = f"{VARIABLE}={name!r} is not a known accelerator"
        told += f"; did you mean {near[0]!r}?" if near else ""
    lines = [
        told,
        f"  found: {', '.join(found)}",
        *(f"  not found: {finding.name}: {finding.reason}" for finding in findings if not finding.available),
        f"Set {VARIABLE} to one of {', '.join(found)}, or unset it to have the accelerator detected. "
        f"Known names: {', '.join(names)}.",
    ]
    return "\n".join(lines)
