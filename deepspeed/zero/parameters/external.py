"""Parameters that are used outside the module that owns them: found when they are read, or named by the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn

from deepspeed.errors import UsageError
from deepspeed.zero.parameters.shard import Shard, shard_of

__all__ = [
    "WatchedParameters",
    "external_parameters",
    "register_external_parameter",
    "unregister_external_parameter",
]

_KEY = "_external_params"


class _Fetches(Protocol):
    @property
    def current(self) -> Any: ...

    def also(self, shard: Shard) -> None: ...


class WatchedParameters(dict[str, Any]):
    """A module's own parameters; reading one that is not whole while the model runs makes it whole.

    The module that is running then uses it from now on: it is gathered with that module's own parameters.
    """

    def __init__(self, parameters: Mapping[str, Any], coordinator: _Fetches) -> None:
        super().__init__(parameters)
        self._coordinator = coordinator

    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        if param is not None and param.numel() == 0 and self._coordinator.current is not None:
            shard = shard_of(param)
            if shard is not None and not shard.whole and shard.numel:
                self._coordinator.also(shard)
        return param

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def external_parameters(module: nn.Module) -> dict[int, nn.Parameter]:
    """The parameters that the module uses and does not own, by number."""
    found: dict[int, nn.Parameter] = module.__dict__.get(_KEY, {})
    return found


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Gather a parameter of another module whenever this module runs, forward and backward."""
    if not isinstance(parameter, nn.Parameter):
        raise UsageError(f"register_external_parameter takes a parameter, found {type(parameter).__name__}")
    module.__dict__.setdefault(_KEY, {})[id(parameter)] = parameter


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo `register_external_parameter`."""
    if id(parameter) not in external_parameters(module):
        raise UsageError("unregister_external_parameter: this parameter is not registered with this module")
    del module.__dict__[_KEY][id(parameter)]
