"""Leaf modules: subtrees that stage 3 gathers and releases as one unit, marked by class, name, suffix or config.

A module is marked by its attribute `_z3_leaf`, a parameter below it by `ds_z3_leaf_module`; clients read both. The
granularity of a module is params // (1 + descendants), without lists, dicts and sequences of modules: where it is at
most `stage3_module_granularity_threshold` the subtree is better gathered at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from deepspeed.errors import UsageError
from deepspeed.log import logger

if TYPE_CHECKING:
    from deepspeed.config.zero import DeepSpeedZeroLeafModuleConfig

__all__ = [
    "apply_zero_leaf_module_config",
    "get_z3_leaf_modules",
    "mark_expert_blocks",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
]

# Names that an error lists; models have thousands.
_SHOWN = 20


def z3_leaf_module(model: nn.Module) -> bool:
    """True if the module is marked."""
    return bool(getattr(model, "_z3_leaf", False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """True if the parameter is gathered with a leaf module."""
    return hasattr(model, "ds_z3_leaf_module")


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Every marked module, in the model's order."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark this one module, or take its mark away."""
    model._z3_leaf = bool(flag)  # type: ignore[assignment]  # torch types attributes of modules as tensors or modules


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type] | Sequence[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark every module of these classes; returns them.

    A class is a type, which its subclasses match too, or its name, plain or with the module that defines it.
    """
    return _flag_classes(model, leaf_module_classes, flag=True, required=raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type] | Sequence[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the mark from every module of these classes; returns them."""
    return _flag_classes(model, leaf_module_classes, flag=False, required=raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules with these paths; returns them, and the paths that the model does not have."""
    return _flag_paths(
        model, module_names, lambda path, name: path == name, kind="named", flag=flag, required=raise_if_not_found
    )


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules whose paths end so; returns them, and the suffixes that no path has."""
    return _flag_paths(
        model, module_name_suffixes, str.endswith, kind="whose path ends with", flag=flag, required=raise_if_not_found
    )


def apply_zero_leaf_module_config(model: nn.Module, leaf_cfg: DeepSpeedZeroLeafModuleConfig | None) -> list[nn.Module]:
    """Mark what `zero_optimization.leaf_module` names; classes may be absent, absent names and suffixes are logged."""
    if leaf_cfg is None:
        return []
    found: list[nn.Module] = []
    if leaf_cfg.classes:
        found += set_z3_leaf_modules(model, leaf_cfg.classes, raise_if_not_found=False)
    for key, names, mark in (
        ("names", leaf_cfg.names, set_z3_leaf_modules_by_name),
        ("name_suffixes", leaf_cfg.name_suffixes, set_z3_leaf_modules_by_suffix),
    ):
        if not names:
            continue
        marked, missing = mark(model, names, raise_if_not_found=False)
        found += marked
        if missing:
            logger.warning(
                "zero_optimization.leaf_module.%s: no module of %s matches %s; remove them or correct them",
                key,
                type(model).__name__,
                missing,
            )
    return _distinct(found)


def mark_expert_blocks(model: nn.Module) -> list[nn.Module]:
    """Mark every block that keeps several experts of one class in a list or dict called `experts`; returns them.

    Which of them a rank uses depends on its tokens, so that ranks would have to ask each other for every expert. What
    a script marked, or said not to be one, stays as it is; so does the model itself, which is no block.
    """
    found = []
    for module in model.modules():
        experts = module._modules.get("experts")
        if not isinstance(experts, (nn.ModuleList, nn.ModuleDict)) or len(experts) < 2:
            continue
        computes = type(experts).forward is not nn.Module.forward
        block = experts if computes else module
        alike = len({type(expert) for expert in experts.children()}) == 1
        if alike and block is not model and not hasattr(block, "_z3_leaf"):
            set_z3_leaf_module(block, True)
            found.append(block)
    return found


def _flag_classes(model: nn.Module, classes: Any, *, flag: bool, required: bool) -> list[nn.Module]:
    wanted = [classes] if isinstance(classes, (str, type)) else list(classes)
    wrong = [each for each in wanted if not isinstance(each, (str, type))]
    if wrong:
        raise UsageError(f"leaf modules are given as classes or names of classes, found {wrong}")
    types = tuple(each for each in wanted if isinstance(each, type))
    names = {each for each in wanted if isinstance(each, str)}
    found = [
        module
        for module in model.modules()
        if isinstance(module, types) or not names.isdisjoint(_names_of(type(module)))
    ]
    if required and not found:
        present = sorted({type(module).__name__ for module in model.modules()})
        raise UsageError(
            f"no module of {type(model).__name__} is of class {_listed(map(str, wanted))}; its classes are "
            f"{_listed(present)}. Correct the list, or pass raise_if_not_found=False"
        )
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _flag_paths(
    model: nn.Module,
    wanted: Sequence[str],
    matches: Callable[[str, str], bool],
    *,
    kind: str,
    flag: bool,
    required: bool,
) -> tuple[list[nn.Module], list[str]]:
    wanted = [wanted] if isinstance(wanted, str) else list(wanted)
    modules = list(model.named_modules())
    found: list[nn.Module] = []
    missing: list[str] = []
    for name in wanted:
        chosen = [module for path, module in modules if matches(path, name)]
        found += chosen
        if not chosen:
            missing.append(name)
    if required and (missing or not wanted):
        raise UsageError(
            f"{type(model).__name__} has no module {kind} {_listed(missing)}; paths are those of named_modules(), such "
            f"as {_listed(path for path, _ in modules if path)}. Correct the list, or pass raise_if_not_found=False"
        )
    found = _distinct(found)
    for module in found:
        set_z3_leaf_module(module, flag)
    return found, missing


def _names_of(kind: type) -> tuple[str, str, str]:
    return kind.__name__, f"{kind.__module__}.{kind.__name__}", f"{kind.__module__}.{kind.__qualname__}"


def _distinct(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return list({id(module): module for module in modules}.values())


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    return f"[{', '.join(shown[:_SHOWN])}{', …' if len(shown) > _SHOWN else ''}]"


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
