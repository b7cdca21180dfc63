"""What clients that take stage 3's hooks off and put them on again use: `optimizer.parameter_offload`."""

from __future__ import annotations

from collections.abc import ItemsView
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import nn

from deepspeed.zero.parameters.module_hooks import ModuleHooks, external_parameters

_EXTERNAL = "ds_external_parameters"


class ParameterOffload:
    """The hooks of one model; without any where parameters are always whole."""

    def __init__(self, module: nn.Module, hooks: ModuleHooks | None) -> None:
        self.module = module
        self.backward_hooks: list[Any] = []
        """None are needed: what runs before a module's backward is attached to its output."""
        self.param_coordinator = SimpleNamespace(
            is_invalid_trace=lambda: False,  # plans that do not fit are found and made anew without help
            _invalidate_trace=lambda: None if hooks is None else hooks.forget_plans(),
        )
        """The part of the coordinator that clients touch."""
        self._hooks = hooks
        vars(module)[_EXTERNAL] = partial(_external, module)

    @property
    def forward_hooks(self) -> list[Any]:
        """The removable handles of all hooks; may be replaced by an empty list after removing them."""
        return self._hooks.handles if self._hooks is not None else []

    @forward_hooks.setter
    def forward_hooks(self, handles: list[Any]) -> None:
        if self._hooks is not None:
            self._hooks.handles = list(handles)

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Put the hooks on again; whatever is left of the old ones goes."""
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks.install()

    def close(self) -> None:
        """Take back what the module was given."""
        vars(self.module).pop(_EXTERNAL, None)


def _external(module: nn.Module) -> ItemsView[int, nn.Parameter]:
    """The parameters that the module uses and does not own."""
    return external_parameters(module).items()
