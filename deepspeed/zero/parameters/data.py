"""What scripts write into parameters: whether it happened, and how a parameter gets its memory back.

[Note: edits] Masters follow what a script writes: in place, which the parameter's version counter shows; through
`param.data`, whose tensors share one counter that is kept here; or by another tensor as the data, which the address
shows. Nothing of this reads values, so that looking costs no wait for a device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed.errors import UsageError
from deepspeed.log import warn_once

_DATA: Any = torch.Tensor.data
show = _DATA.__set__
"""Let a parameter lie in some memory; not counted as a write."""

plain_access = torch._C.DisableTorchFunctionSubclass
"""Inside, torch does not look for `__torch_function__`, which takes longer than to read a parameter of our classes."""


def plain_data(param: Tensor) -> Tensor:
    """The parameter's values as a tensor whose writes are not counted."""
    found: Tensor = _DATA.__get__(param)
    return found


class WatchedData:
    """A parameter that counts the writes through its `data`."""

    _given: Tensor | None = None
    """What shares its version counter with all that was given away as the data."""
    _past = 0
    """Writes through the data that it had before."""

    @property
    def data(self) -> Tensor:
        found, given = plain_data(self), self._given  # type: ignore[arg-type]
        if not found.numel():
            return found
        if given is None or not _is_same(given, found):
            self._drop_given()
            given = self._given = found
        return given.detach()  # another tensor with the same counter

    @data.setter
    def data(self, value: Tensor) -> None:
        self._drop_given()  # it would keep the memory alive
        show(self, value)
        self._data_replaced(value)

    def _data_replaced(self, value: Tensor) -> None:
        """Called after another tensor was given as the data."""

    def _drop_given(self) -> None:
        if self._given is not None:
            self._past += self._given._version
            self._given = None


def writes(param: Tensor) -> int:
    """How often the parameter was written in place, by itself or, where that is watched, through its data."""
    if not isinstance(param, WatchedData):
        return param._version
    given = param._given
    return param._version + param._past + (0 if given is None else given._version)


def reclaim(name: str, param: Tensor, home: Tensor) -> bool:
    """Let a parameter whose data was replaced lie in its own memory again, with the new values; True if it was."""
    if _is_same(param, home):
        return False
    if param.shape != home.shape:
        raise UsageError(
            f"{name} came back with the shape {tuple(param.shape)} instead of {tuple(home.shape)}; replace the "
            "module's parameter by a new one to change its shape"
        )
    if (param.dtype, param.device) != (home.dtype, home.device):
        warn_once(
            f"{name} is {param.dtype} on {param.device} by now, but the engine trains it as {home.dtype} on "
            f"{home.device}: it is converted back. Choose the dtype by bf16 or fp16 in the config, and leave the "
            "module on the engine's device."
        )
    with torch.no_grad():  # not around everything: to enter it costs more than to compare
        values = plain_data(param)
        if values.untyped_storage().data_ptr() == home.untyped_storage().data_ptr():
            values = values.clone()  # the same memory in another order
        home.copy_(values)
        show(param, home)
    return True


def _is_same(one: Tensor, other: Tensor) -> bool:
    """True for tensors that are the same view of the same memory."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
    )
