"""Which modules become leaf units because their parameters are small for the number of modules below them.

The granularity of a module is params // (1 + descendants). Hooks cost time per module, so where that number is at
most `stage3_module_granularity_threshold` the subtree is better gathered at once. Lists, dicts and sequences of modules
only hold others: they neither count nor become units.
"""

from __future__ import annotations

from torch import nn

from deepspeed.log import logger

__all__ = ["granularity", "units_by_granularity"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def granularity(module: nn.Module) -> int:
    """Elements of all parameters below, per module."""
    numel = sum(int(getattr(param, "ds_numel", param.numel())) for param in module.parameters())
    below = sum(type(each) not in _CONTAINERS for each in module.modules() if each is not module)
    return numel // (1 + below)


def units_by_granularity(model: nn.Module, threshold: int) -> dict[str, nn.Module]:
    """The outermost modules with children whose granularity is at most `threshold`, by path; none for 0.

    What lies below a module that is marked as a leaf already (`_z3_leaf`) is left alone. A module without children is
    a unit anyway.
    """
    if threshold <= 0:
        return {}
    units: dict[str, nn.Module] = {}
    smallest: tuple[int, str] | None = None
    pending, seen = [("", model)], set[int]()
    while pending:
        path, module = pending.pop()
        if id(module) in seen or getattr(module, "_z3_leaf", False):
            continue
        seen.add(id(module))
        children = list(module.named_children())
        if children and type(module) not in _CONTAINERS:
            size = granularity(module)
            if size <= threshold:
                units[path] = module
                continue
            smallest = min(smallest or (size, path), (size, path))
        pending += [(f"{path}.{name}" if path else name, child) for name, child in reversed(children)]
    _tell(model, threshold, units, smallest)
    return units


def _tell(model: nn.Module, threshold: int, units: dict[str, nn.Module], smallest: tuple[int, str] | None) -> None:
    if units:
        listed = ", ".join(f"{path or 'the whole model'} ({type(unit).__name__})" for path, unit in units.items())
        logger.info("stage3_module_granularity_threshold %d makes units of: %s", threshold, listed)
    elif smallest is not None:
        logger.warning(
            "stage3_module_granularity_threshold %d has no effect: the smallest granularity in %s is %d, of %s; set it "
            "to that or more, or remove it",
            threshold,
            type(model).__name__,
            smallest[0],
            smallest[1] or "the whole model",
        )
