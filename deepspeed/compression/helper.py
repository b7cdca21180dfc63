"""What is done to models before they are compressed: layers of a teacher, and plain linear layers. Modules by paths."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from deepspeed.compression.plan import PATH, check_deepspeed_config, unwrapped
from deepspeed.errors import UsageError

__all__ = [
    "convert_conv1d_to_linear",
    "module_at",
    "recursive_getattr",
    "recursive_setattr",
    "student_initialization",
]


def recursive_getattr(model: Any, module_name: str) -> Any:
    """What is at a path of attributes; numbers are places in a list of modules."""
    for name in module_name.split("."):
        model = getattr(model, name)
    return model


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Put something at a path of attributes."""
    parent, _, last = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, last, module)


def convert_conv1d_to_linear(model: nn.Module, convert_type: type[nn.Module]) -> nn.Module:
    """Let layers of a class whose weight is [inputs, outputs] be `torch.nn.Linear`, in place; returns the model.

    A weight that several layers share, or one that is shared with an embedding, is shared no longer.
    """
    inner = unwrapped(model)
    made: dict[int, nn.Linear] = {}
    for name, module in list(inner.named_modules(remove_duplicate=False)):
        if not isinstance(module, convert_type):
            continue
        if not name:
            raise UsageError("convert_conv1d_to_linear: the model itself is such a layer; give a model that has them")
        if id(module) not in made:
            made[id(module)] = _linear(module)
        recursive_setattr(inner, name, made[id(module)])
    return model


def _linear(module: nn.Module) -> nn.Linear:
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    assert weight is not None, "the layer has a weight"
    inputs, outputs = weight.shape
    made = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight.detach().t().contiguous(), requires_grad=weight.requires_grad)
    if bias is not None:
        made.bias = bias
    return made.train(module.training)


def student_initialization(student_model: nn.Module, teacher_model: nn.Module, deepspeed_config: Any) -> None:
    """Copy the teacher's layers that `layer_reduction` lists, and its other modules, into the student."""
    section = check_deepspeed_config(deepspeed_config).layer_reduction
    path = f"{PATH}.layer_reduction"
    student, teacher = unwrapped(student_model), unwrapped(teacher_model)
    pairs = []
    for place, number in enumerate(section.teacher_layer):
        names = f"{section.module_name_prefix}.{place}", f"{section.module_name_prefix}.{number}"
        pairs.append((*names, f"{path}.teacher_layer"))
    pairs += [(name, name, f"{path}.other_module_name") for name in section.other_module_name]
    found = [
        (module_at(student, own, "the student", key), module_at(teacher, theirs, "the teacher", key), own, theirs)
        for own, theirs, key in pairs
    ]
    _require_as_many(student, section.module_name_prefix, section.keep_number_layer or len(section.teacher_layer), path)
    with torch.no_grad():
        for mine, source, own, theirs in found:
            _copy(mine, source, f"{path}: {own} of the student and {theirs} of the teacher")


def module_at(model: nn.Module, name: str, whose: str, key: str) -> nn.Module:
    """The module at a path; an error that tells what `whose` model has near it, for the config's `key`."""
    try:
        found = recursive_getattr(model, name)
    except AttributeError:
        found = None
    if not isinstance(found, nn.Module):
        parent = name.rpartition(".")[0]
        try:
            inside = [each for each, _ in recursive_getattr(model, parent).named_children()] if parent else []
        except AttributeError:
            inside = []
        near = f"{parent} has {', '.join(inside[:1] + inside[1:][-1:])}" if inside else ""
        paths = [path for path, _ in model.named_modules() if path]
        near = near or f"near names: {', '.join(get_close_matches(name, paths, 3, 0.3)) or 'none'}"
        raise UsageError(f"{key}: {whose} has no module {name!r}; {near}")
    return found


def _require_as_many(student: nn.Module, prefix: str, count: int, path: str) -> None:
    layers = len(list(recursive_getattr(student, prefix).children()))
    if layers != count:
        raise UsageError(
            f"{path}.teacher_layer lists {count} layers, and the student has {layers} at {prefix}; list one for each"
        )


def _copy(mine: nn.Module, source: nn.Module, what: str) -> None:
    values = dict([*source.named_parameters(), *source.named_buffers()])
    for name, target in [*mine.named_parameters(), *mine.named_buffers()]:
        value = values.get(name)
        if value is None or value.shape != target.shape:
            there = "is missing there" if value is None else f"has the shape {tuple(value.shape)} there"
            raise UsageError(f"{what} differ: {name}, of {tuple(target.shape)}, {there}")
        target.copy_(value)
