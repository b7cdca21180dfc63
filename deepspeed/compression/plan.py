"""Which modules of a model a config compresses: patterns, the modules that they find, and those related to them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from torch import nn

from deepspeed.compression.basic_layer import (
    BNLayer_Compress,
    CompressedLayer,
    Conv2dLayer_Compress,
    Embedding_Compress,
    LinearLayer_Compress,
)
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.compression import CompressionConfig, PruningGroup, PruningParams, Technique
from deepspeed.errors import UsageError
from deepspeed.log import log_dist
from deepspeed.transformers.replacement import class_before

KINDS: tuple[tuple[type[nn.Module], type[CompressedLayer]], ...] = (
    (nn.Linear, LinearLayer_Compress),
    (nn.Conv2d, Conv2dLayer_Compress),
    (nn.Embedding, Embedding_Compress),
    (nn.BatchNorm2d, BNLayer_Compress),
)
PATH = "compression_training"


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The modules of a group of a technique."""

    technique: str
    group: str
    names: Sequence[str]
    related: Sequence[Sequence[str]] = field(default=())
    """For each of them, the modules that get smaller with it."""


def techniques_of(section: CompressionConfig) -> dict[str, Any]:
    """The techniques that change modules and are on, by their keys."""
    both = ((name, getattr(section, name)) for name in type(section).model_fields)
    return {name: each for name, each in both if isinstance(each, Technique) and each.shared_parameters.enabled}  # type: ignore[attr-defined]


def check_deepspeed_config(config: Any) -> CompressionConfig:
    """The section of a config: of a path, a mapping, or a config that is loaded."""
    if isinstance(config, CompressionConfig):
        return config
    found = config if isinstance(config, DeepSpeedConfig) else DeepSpeedConfig(config, partial=True)
    return found.schema.compression_training


def kind_of(module: nn.Module, mpu: Any = None) -> type[CompressedLayer] | None:
    """What a module becomes; None if it cannot be compressed."""
    if isinstance(module, CompressedLayer):
        return type(module)
    parallel = tuple(
        each for each in (getattr(mpu, name, None) for name in ("ColumnParallelLinear", "RowParallelLinear")) if each
    )
    if parallel and isinstance(module, parallel):
        return LinearLayer_Compress
    return next((kind for base, kind in KINDS if isinstance(module, base)), None)


def get_module_name(
    group_name: str,
    model: nn.Module,
    key_word: str,
    exist_module_name: set[str],
    mpu: Any = None,
    verbose: bool = True,
    technique: str | None = None,
) -> tuple[list[str], set[str]]:
    """(names of the modules that a pattern finds, those found so far together with them).

    `technique` leaves out modules that it does not fit; a module that was found before is an error.
    """
    found = []
    for name, module in model.named_modules():
        kind = kind_of(module, mpu)
        if kind is None or (technique is not None and technique not in kind.fits):
            continue
        if key_word == "*" or re.search(key_word, name):
            found.append(name)
    twice = [name for name in found if name in exist_module_name]
    if twice:
        raise UsageError(
            f"{PATH}.{technique or 'modules'}: {key_word!r} of the group {group_name!r} finds {some(twice)}, which an "
            "earlier pattern found; let one pattern of the technique match each module"
        )
    if verbose:
        log_dist(f"compression: {group_name}, {key_word!r}: {some(found)}")
    return found, exist_module_name | set(found)


def get_compress_methods(model: nn.Module, compress_methods: Any, mpu: Any = None) -> list[GroupPlan]:
    """What a section does to which modules of a model; `compress_methods` is the section, or holds it."""
    return list(plans_of(model, section_of(compress_methods), mpu, partly=False))


def section_of(given: Any) -> CompressionConfig:
    """The section of whatever holds it."""
    if isinstance(given, CompressionConfig):
        return given
    if isinstance(given, Mapping):
        inner = given.get(PATH, given)
        return CompressionConfig.model_validate(dict(inner))
    return check_deepspeed_config(given)


def plans_of(model: nn.Module, section: CompressionConfig, mpu: Any, *, partly: bool) -> Iterator[GroupPlan]:
    """`partly`: the model is a part of a whole one, so that patterns may find nothing here."""
    for technique, settings in techniques_of(section).items():
        known: set[str] = set()
        spared = _spared(model, settings, technique, mpu, partly=partly)
        for label, group in groups_of(settings).items():
            names: list[str] = []
            related: list[list[str]] = []
            for place, pattern in enumerate(group.modules):
                found, known = get_module_name(label, model, pattern, known, mpu, False, technique)
                where = f"{PATH}.{technique}.different_groups.{label}"
                if not found and not partly:
                    raise UsageError(_nothing(model, pattern, technique, f"{where}.modules", mpu))
                found, whole = [name for name in found if name not in spared], found
                if whole and not found and not partly:
                    raise UsageError(
                        f"{where}.modules: {pattern!r} finds {some(whole)}, and excluded_modules of shared_parameters "
                        "keeps all of them whole; shorten one of the lists"
                    )
                names += found
                others = [] if group.related_modules is None else group.related_modules[place]
                related += _pairs(model, found, others, technique, f"{where}.related_modules")
            yield GroupPlan(technique, label, names, related)


def groups_of(settings: Any) -> dict[str, Any]:
    """The groups of a technique; of snip_momentum what they leave out is shared, and without any it takes all."""
    groups: dict[str, Any] = settings.different_groups
    shared = settings.shared_parameters
    if getattr(shared, "method", None) != "snip_momentum":
        return groups
    found = {}
    for name, group in (groups or {"all modules": PruningGroup()}).items():
        ratio = group.params.dense_ratio or shared.dense_ratio
        found[name] = group.model_copy(update={"params": PruningParams(dense_ratio=ratio)})
    return found


def _spared(model: nn.Module, settings: Any, technique: str, mpu: Any, *, partly: bool) -> set[str]:
    """The modules that `excluded_modules` keeps whole."""
    found: set[str] = set()
    shared = settings.shared_parameters
    for pattern in shared.excluded_modules if getattr(shared, "method", None) == "snip_momentum" else ():
        names, _ = get_module_name("excluded_modules", model, pattern, set(), mpu, False, technique)
        if not names and not partly:
            where = f"{PATH}.{technique}.shared_parameters.excluded_modules"
            raise UsageError(_nothing(model, pattern, technique, where, mpu))
        found.update(names)
    return found


def _nothing(model: nn.Module, pattern: str, technique: str, path: str, mpu: Any) -> str:
    kinds = {name: kind_of(module, mpu) for name, module in model.named_modules()}
    names = [name for name, kind in kinds.items() if kind is not None and technique in kind.fits]
    others = [name for name in kinds if pattern != "*" and re.search(pattern, name)]
    near = get_close_matches(pattern, names, 3, 0.3) or names[:3]
    why = ""
    if others:
        classes = sorted({type(model.get_submodule(name)).__name__ for name in others})
        why = f" It finds modules of other kinds ({', '.join(classes[:4])})."
        if "Conv1D" in classes:
            why += " Call deepspeed.compression.helper.convert_conv1d_to_linear first."
    return (
        f"{path}: {pattern!r} finds no module that {technique} fits.{why} Near names: {', '.join(near) or 'none'}. "
        "For a pipeline, leave it to deepspeed.initialize"
    )


def _pairs(model: nn.Module, names: Sequence[str], others: Sequence[str], technique: str, path: str) -> list[list[str]]:
    """The related modules of each name: the one at the same place among those that a pattern finds."""
    columns = []
    kinds = {name: kind for name, module in model.named_modules() if (kind := kind_of(module)) is not None}
    for pattern in others:
        found = [name for name in kinds if re.search(pattern, name)]
        strange = [name for name in found if technique not in (*kinds[name].fits, *kinds[name].follows)]
        if strange:
            raise UsageError(
                f"{path}: {pattern!r} finds {strange[0]}, a {type(model.get_submodule(strange[0])).__name__}, which "
                f"cannot get smaller with {technique}; leave it out"
            )
        if len(found) != len(names):
            raise UsageError(
                f"{path}: {pattern!r} finds {len(found)} modules ({some(found)}), and the pattern that they belong to "
                f"{len(names)} ({some(names)}); both must find as many, in the same order"
            )
        columns.append(found)
    return [list(row) for row in zip(*columns, strict=True)] if columns else [[] for _ in names]


def some(names: Sequence[str]) -> str:
    """The first of some names, and how many there are."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more if names else "none"


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of an engine or of torch's wrapper."""
    inner = getattr(model, "module", None)
    return inner if isinstance(inner, nn.Module) else model


def compressed_layer(model: nn.Module, name: str, mpu: Any = None) -> CompressedLayer:
    """The module, of a class that can be compressed."""
    module = model.get_submodule(name)
    if not isinstance(module, CompressedLayer):
        kind, original = kind_of(module, mpu), type(module)
        assert kind is not None, "plans name modules that can be compressed"
        if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
            raise UsageError(f"{PATH}: {name} is an embedding with max_norm or sparse gradients; leave it out")
        module.__class__ = kind if (original, kind) in KINDS else class_before(kind, original, kind.__name__)
        assert isinstance(module, CompressedLayer), "its class was put before"
        module.compressed.original = original
    module.compressed.name = name
    return module
