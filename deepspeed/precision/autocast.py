"""torch.autocast around the engine's forward: which dtype, which modules' gradients travel in it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.log import warn_once
from deepspeed.precision.cast import DTYPES, short

if TYPE_CHECKING:
    from deepspeed.config.precision import TorchAutocastConfig

SAFE_MODULES: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Modules that autocast computes in the lower precision anyway: their gradients lose nothing by travelling in it."""

_NOTHING = nullcontext()  # may be entered again and again
_MODULES_KEY = "torch_autocast.lower_precision_safe_modules"


@dataclass(frozen=True, slots=True)
class AutocastPolicy:
    """Forward runs under torch.autocast with this dtype, whatever autocast was open outside."""

    dtype: torch.dtype
    modules: tuple[type[nn.Module], ...] = SAFE_MODULES
    device_type: str = "cpu"

    @classmethod
    def from_config(cls, section: TorchAutocastConfig, device_type: str | None = None) -> AutocastPolicy | None:
        """The policy of the `torch_autocast` section, None where it is off; the device is the accelerator's."""
        if not section.enabled:
            return None
        device_type = device_type or get_accelerator().device_name()
        dtype = DTYPES[section.dtype] if section.dtype is not None else torch.get_autocast_dtype(device_type)
        if dtype == torch.float32:
            raise DeepSpeedConfigError(
                "torch_autocast.dtype: fp32 is no lower precision, torch.autocast computes in fp16 or bf16; use one "
                "of them, or set torch_autocast.enabled to false",
                path="torch_autocast.dtype",
            )
        names = section.lower_precision_safe_modules
        return cls(dtype, SAFE_MODULES if names is None else resolve_modules(names), device_type)

    def communication_dtypes(self, module: nn.Module) -> dict[nn.Parameter, torch.dtype]:
        """Parameters owned by one of the classes themselves → the dtype that their gradients travel in.

        Subclasses do not count, nor do parameters of children. A parameter that is shared with a module of another
        class is among them.
        """
        return {
            parameter: self.dtype
            for each in module.modules()
            if type(each) in self.modules
            for parameter in each.parameters(recurse=False)
        }

    def describe(self) -> str:
        """A few words for a log line."""
        return f"autocast to {short(self.dtype)} on {self.device_type}"


def forward_context(policy: AutocastPolicy | None, device_type: str | None = None) -> AbstractContextManager[Any]:
    """A context for one forward: the policy's autocast, or none at all, also where one is open outside."""
    if policy is None and not torch._C._is_any_autocast_enabled():
        return _NOTHING
    device_type = policy.device_type if policy is not None else device_type or get_accelerator().device_name()
    outside = torch.is_autocast_enabled(device_type)
    if policy is not None:
        if outside and torch.get_autocast_dtype(device_type) != policy.dtype:
            warn_once(
                f"torch.autocast is open around the engine with {short(torch.get_autocast_dtype(device_type))}; inside "
                f"the engine torch_autocast.dtype, {short(policy.dtype)}, counts"
            )
        return torch.autocast(device_type, dtype=policy.dtype)
    if not outside:
        return _NOTHING
    warn_once(
        "torch.autocast is open around the engine but torch_autocast.enabled is false, so that it is off inside the "
        "engine; set torch_autocast.enabled to use it"
    )
    return torch.autocast(device_type, enabled=False)


def resolve_modules(names: Sequence[str]) -> tuple[type[nn.Module], ...]:
    """The module classes that fully qualified names stand for."""
    return tuple(_resolve(name, f"{_MODULES_KEY}[{index}]") for index, name in enumerate(names))


def _resolve(name: str, path: str) -> type[nn.Module]:
    home, _, attribute = name.rpartition(".")
    if not home or not all(part.isidentifier() for part in name.split(".")):
        raise DeepSpeedConfigError(
            f"{path}: {name!r} is not a fully qualified class name; write it as torch.nn.Linear is written", path=path
        )
    try:
        found = getattr(_import(home), attribute)
    except (ImportError, AttributeError) as error:
        raise DeepSpeedConfigError(
            f"{path}: {name!r} cannot be imported ({error}); give the module that defines the class, and its name",
            path=path,
        ) from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise DeepSpeedConfigError(f"{path}: {name!r} is no subclass of torch.nn.Module but {found!r}", path=path)
    return found


def _import(name: str) -> Any:
    """A module, or a class in one: classes may be nested."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        home, _, attribute = name.rpartition(".")
        if not home or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and something that it imports is not
        return getattr(_import(home), attribute)
