"""Casts of a module to the training dtype, and of inputs to it, in place where possible and free where nothing changes.

[Note: buffers] Buffers are left alone by default: rotary tables and the like are made in fp32 because 16 bits spoil
them. `data_types.buffer_dtype` casts them, except those that `data_types.keep_in_fp32_modules` names.

[Note: running statistics] torch's batch norm, on the CPU and in cuDNN, refuses 16-bit weights beside fp32 statistics,
and 16-bit statistics stop moving once momentum × change falls below their precision, which spoils evaluation without
a word. It does take 16-bit inputs with weights and statistics in fp32. So a normalisation that keeps running
statistics has one dtype: the training dtype if its statistics have it (loaded so, or asked for by buffer_dtype),
otherwise fp32, its parameters included.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.log import log_dist, warn_once

DTYPES: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

CASTABLE = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
"""What a cast may change. Eight-bit floats are quantised values, which mean nothing without their scales."""

_SHORT = {dtype: name for name, dtype in DTYPES.items()}


def short(dtype: torch.dtype) -> str:
    """`bf16` for torch.bfloat16; torch's own name where the config has none."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


_KEEP_KEY = "data_types.keep_in_fp32_modules"
_CAST_INPUTS = "cast inputs"

_WITH_STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


@dataclass(frozen=True, slots=True)
class BufferRule:
    """What a cast does to floating buffers; the default is nothing."""

    dtype: torch.dtype | None = None
    """None leaves them as they are."""
    keep: tuple[str, ...] | None = None
    """Patterns of the full names of buffers that are fp32, `*` standing for anything; None asks the modules."""

    def kept(self, module: nn.Module, training_dtype: torch.dtype) -> re.Pattern[str] | None:
        """What matches the full names of the buffers that are fp32; None if nothing is."""
        if self.keep is not None:
            parts = [_pattern(each) for each in self.keep]
        else:
            parts = [rf"(?:^|\.)(?:{_pattern(each)})(?:\.|$)" for each in _declared(module, training_dtype)]
        return re.compile("|".join(f"(?:{part})" for part in parts)) if parts else None


def cast_module(module: nn.Module, dtype: torch.dtype, buffers: BufferRule | None = None) -> str:
    """Cast the parameters of `module` to `dtype`, and its buffers as `buffers` says; returns a line for the log.

    Parameters and buffers stay the objects that they are, so that ties, optimizers and hooks hold. Integers, booleans
    and quantised values are not touched.
    """
    target = parameter_dtypes(module, dtype, buffers or BufferRule())
    cast_buffers, other_buffers = 0, []
    for name, buffer, wanted in _buffers(module, dtype, buffers or BufferRule()):
        cast_buffers += _cast_in_place(buffer, wanted)
        if buffer.dtype != dtype:
            other_buffers.append(name)
    cast_parameters, other_parameters, found = 0, [], set()
    for name, parameter in module.named_parameters():
        if parameter.dtype in CASTABLE:
            found.add(parameter.dtype)
            cast_parameters += _cast_in_place(parameter, target.get(id(parameter), dtype))
            if parameter.dtype != dtype:
                other_parameters.append(name)
    if cast_parameters:
        for each in module.modules():
            if isinstance(each, nn.RNNBase):
                each.flatten_parameters()  # cuDNN wants the weights in one piece, which the cast took apart
    line = f"cast to {short(dtype)}: {cast_parameters} parameters and {cast_buffers} buffers"
    for what, names in (("parameters", other_parameters), ("buffers", other_buffers)):
        if names:  # of another dtype than the training dtype: see [Note: running statistics]
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            line += f"; {len(names)} {what} keep another dtype ({shown})"
    if dtype == torch.float32 and cast_parameters:
        dtypes = " and ".join(sorted(short(each) for each in found - {torch.float32}))
        warn_once(
            f"the config trains in fp32 and the model came with {cast_parameters} parameters in {dtypes}, which were "
            "cast to fp32; set bf16.enabled or fp16.enabled to train in 16 bits"
        )
    elif cast_parameters or cast_buffers:
        log_dist(line)
    return line


def _cast_in_place(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Give `tensor` another dtype without giving its place to another object; True if it had to change."""
    if tensor.dtype == dtype:
        return False
    grad = tensor.grad if tensor.is_leaf else None
    if grad is not None:
        tensor.grad = None  # a gradient has the dtype of its tensor at every moment
    tensor.data = tensor.data.to(dtype)
    if grad is not None:
        tensor.grad = grad.to(dtype)
    return True


def parameter_dtypes(module: nn.Module, dtype: torch.dtype, rule: BufferRule) -> dict[int, torch.dtype]:
    """By id, the dtypes of those parameters that do not follow the training dtype."""
    wanted = {id(buffer): want for _, buffer, want in _buffers(module, dtype, rule)}
    return {
        id(parameter): wanted.get(id(each.running_mean), dtype)
        for each in module.modules()
        if _has_statistics(each)
        for parameter in each.parameters(recurse=False)
    }


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(module, _WITH_STATISTICS) and module.running_mean is not None


def _buffers(module: nn.Module, dtype: torch.dtype, rule: BufferRule) -> Iterator[tuple[str, Tensor, torch.dtype]]:
    """Every floating buffer once: full name, buffer, the dtype that it should have."""
    kept = rule.kept(module, dtype)
    seen: set[int] = set()

    def want(name: str, buffer: Tensor) -> torch.dtype:
        if kept is not None and kept.search(name):
            return torch.float32 if buffer.element_size() < 4 else buffer.dtype
        # With fp32 there is no lower precision for buffers to follow.
        return buffer.dtype if rule.dtype is None or dtype == torch.float32 else rule.dtype

    for prefix, each in module.named_modules():
        own = [
            (f"{prefix}.{name}" if prefix else name, buffer)
            for name, buffer in each.named_buffers(recurse=False)
            if buffer.dtype in CASTABLE and id(buffer) not in seen
        ]
        seen.update(id(buffer) for _, buffer in own)
        wants = [want(name, buffer) for name, buffer in own]
        if _has_statistics(each):
            one = dtype if all(each_want == dtype for each_want in wants) else torch.float32
            wants = [one] * len(wants)
        yield from ((name, buffer, wanted) for (name, buffer), wanted in zip(own, wants, strict=True))


def _declared(module: nn.Module, training_dtype: torch.dtype) -> list[str]:
    """What the modules themselves, as those of Hugging Face do, say must be fp32."""
    attributes = ["_keep_in_fp32_modules_strict"]
    if training_dtype == torch.float16:
        attributes.append("_keep_in_fp32_modules")
    names: dict[str, None] = {}
    for each in module.modules():
        for attribute in attributes:
            names.update(dict.fromkeys(getattr(each, attribute, None) or ()))
    return list(names)


def _pattern(text: str) -> str:
    """A pattern of the config as a regular expression."""
    expression = text.replace("*", ".*")
    try:
        re.compile(expression)
    except re.error as error:
        raise DeepSpeedConfigError(
            f"{_KEEP_KEY}: {text!r} is not a name pattern ({error}); write part of a buffer's full name, with * for "
            "anything",
            path=_KEEP_KEY,
        ) from error
    return expression


def cast_inputs(
    args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with every floating tensor in `dtype`, also those inside containers; nothing is changed in place.

    A container in which nothing changes is passed on as it is.
    """
    return tuple(_cast(each, dtype) for each in args), {key: _cast(each, dtype) for key, each in kwargs.items()}


def explain_dtypes(error: RuntimeError, inputs: Any, dtype: torch.dtype) -> None:
    """Add to torch's error about dtypes what the model computes in, if an input has another one."""
    given = [each.dtype for each in tree_leaves(inputs) if isinstance(each, Tensor) and each.dtype in CASTABLE]
    other = sorted({short(each) for each in given if each != dtype})
    if other and "type" in str(error) and _CAST_INPUTS not in str(error):
        hint = f"the model computes in {short(dtype)}: {_CAST_INPUTS}, which are {' and '.join(other)}, to {dtype}"
        error.args = (f"{error}\n{hint}", *error.args[1:])


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype in CASTABLE else value
    if isinstance(value, (list, tuple)):
        items = [_cast(each, dtype) for each in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if type(value) in (list, tuple):
            return type(value)(items)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        changed = {key: new for key, old in value.items() if (new := _cast(old, dtype)) is not old}
        return _with_items(value, changed) if changed else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        present = [each.name for each in dataclasses.fields(value) if hasattr(value, each.name)]
        fields = {name: getattr(value, name) for name in present}
        changed = {name: new for name, old in fields.items() if (new := _cast(old, dtype)) is not old}
        return _with_fields(value, changed) if changed else value
    return value


def _with_items(value: Mapping[Any, Any], changed: Mapping[Any, Any]) -> Any:
    """A mapping of the same kind; one that cannot be written to becomes a dict."""
    other: Any = copy.copy(value) if hasattr(value, "__setitem__") else dict(value)
    for key, item in changed.items():
        other[key] = item
    return other


def _with_fields(value: Any, changed: Mapping[str, Any]) -> Any:
    other = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(other, name, item)  # a frozen dataclass is not changed by this: its copy is
    return other
