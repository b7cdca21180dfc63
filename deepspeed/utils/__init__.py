"""Helpers that scripts and clients reach as `deepspeed.utils.<name>`; resolved on first use."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from deepspeed import log as logging
from deepspeed._package import lazy
from deepspeed.log import log_dist, log_dist_once, logger, print_json_dist, set_log_level_from_string
from deepspeed.published.old_paths import STATE_ACCESS, names_at

if TYPE_CHECKING:
    from deepspeed.accelerator.nvtx import instrument_w_nvtx
    from deepspeed.comm import is_initialized
    from deepspeed.published import groups
    from deepspeed.published.init_on_device import OnDevice
    from deepspeed.runtime.dataloader import RepeatingLoader
    from deepspeed.zero.public.access import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_get_local_fp32_param,
        safe_get_local_grad,
        safe_get_local_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_grad,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_grad,
        safe_set_local_optimizer_state,
        safe_update_full_grad_vectorized,
    )
    from deepspeed.zero.public.leaf import (
        get_z3_leaf_modules,
        set_z3_leaf_module,
        set_z3_leaf_modules,
        set_z3_leaf_modules_by_name,
        set_z3_leaf_modules_by_suffix,
        unset_z3_leaf_modules,
        z3_leaf_module,
        z3_leaf_parameter,
    )

_LEAVES = names_at(
    "deepspeed.zero.public.leaf",
    "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name "
    "set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module z3_leaf_parameter",
)
_LAZY = {
    "OnDevice": "deepspeed.published.init_on_device:OnDevice",
    "RepeatingLoader": "deepspeed.runtime.dataloader:RepeatingLoader",
    "groups": "deepspeed.published.groups",
    "instrument_w_nvtx": "deepspeed.accelerator.nvtx:instrument_w_nvtx",
    "is_initialized": "deepspeed.comm:is_initialized",
    **{name: f"{home}:{name}" for name, home in (STATE_ACCESS | _LEAVES).items()},
}

__all__ = [
    "OnDevice",
    "RepeatingLoader",
    "get_z3_leaf_modules",
    "groups",
    "instrument_w_nvtx",
    "is_initialized",
    "log_dist",
    "log_dist_once",
    "logger",
    "logging",
    "print_json_dist",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_log_level_from_string",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
]

__getattr__ = lazy(__name__, _LAZY)


class _Facade(ModuleType):
    """`z3_leaf_module` is a function here and also the name of a module below: importing that must not hide this."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name == "z3_leaf_module" and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Facade


def __dir__() -> list[str]:
    return sorted(__all__)
