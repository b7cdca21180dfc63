"""The three values that DeepSpeed pickles as objects, as objects that need no class of anybody.

[Note: objects without classes]
DeepSpeed's loader asks a fragment address for `.numel` and `.start`, and at stage 3 the loss scaler for `.cur_scale`,
`.scale_loss(loss)` and `.update_scale(overflow)`. `torch.load(weights_only=True)` builds an `OrderedDict` together with
its attributes, so that is what such an object is here. A scaler whose factor is one needs only an identity as
`scale_loss`, which `torch.Tensor` is for a tensor of any dtype and device (it returns an alias that autograd follows),
and something that swallows a bool as `update_scale`, which `complex` does. Nothing that the safe loader admits can
multiply by another factor: at stage 3 in fp16 there is no such object, and the entry is left out. DeepSpeed then stops
at the load, naming the entry. At stages 1 and 2 it goes on with its own initial scale. `with_classes` writes what it
wants instead, at the price of a file that needs its classes to be read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from deepspeed.precision.loss_scaler import DynamicLossScaler, LossScaler, LossScalerBase

_HOME = "deepspeed.runtime.fp16.loss_scaler"


def address(numel: int, start: int) -> OrderedDict[str, int]:
    """A stand-in for DeepSpeed's `fragment_address`."""
    result: OrderedDict[str, int] = OrderedDict()
    vars(result).update(numel=numel, start=start)
    return result


def scaler_stand_in(attributes: Mapping[str, Any] | None) -> OrderedDict[str, Any] | None:
    """A stand-in for a loss scaler; None where the factor is not a constant one."""
    if attributes is not None and (attributes.get("dynamic") or attributes.get("cur_scale", 1) != 1):
        return None
    result: OrderedDict[str, Any] = OrderedDict()
    vars(result).update(cur_scale=1.0, dynamic=False, scale_loss=torch.Tensor, update_scale=complex)
    return result


def scaler_attributes(scaler: Any) -> dict[str, Any] | None:
    """What a loss scaler in a file knows, whoever wrote it."""
    if scaler is None:
        return None
    found = dict(scaler) if type(scaler) is dict else dict(vars(scaler))
    found.pop("scale_loss", None)
    found.pop("update_scale", None)
    return found


@contextmanager
def _named_as_deepspeed_does() -> Iterator[None]:
    """The scalers' classes under the path where DeepSpeed has them, which is also an alias of ours."""
    classes: tuple[type, ...] = (LossScaler, DynamicLossScaler)
    ours = [kind.__module__ for kind in classes]
    try:
        for kind in classes:
            kind.__module__ = _HOME
        yield
    finally:
        for kind, module in zip(classes, ours, strict=True):
            kind.__module__ = module


def with_classes(entries: Mapping[str, Any], path: Path) -> None:
    """`torch.save` of an optimizer's file with its loss scaler as an object of DeepSpeed's class."""
    state = dict(entries["optimizer_state_dict"])
    attributes = state.get("loss_scale") or {"cur_scale": 1.0, "dynamic": False}
    scaler: LossScalerBase = object.__new__(DynamicLossScaler if attributes.get("dynamic") else LossScaler)
    vars(scaler).update(attributes)
    state["loss_scaler"] = scaler
    with _named_as_deepspeed_does():
        torch.save({**entries, "optimizer_state_dict": state}, path)
