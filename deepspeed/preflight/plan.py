"""What the states of one parameter take of each kind of memory under a config: bytes per rank, before any model exists.

Masters and moments go where `offload_optimizer` says, weights where `offload_param` says. Gradients of offloaded states
stay in host memory, in the width of the weights where a step has one micro batch, else in that of their sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed.config.offload import OffloadDeviceEnum
from deepspeed.config.schema import Schema
from deepspeed.memory.states import Widths
from deepspeed.precision.policy import Precision

__all__ = ["Needs", "needs_of", "widths_of"]

_MOMENTS = {"lion": 1, "adagrad": 1, "muon": 1, "rmsprop": 1}  # others are taken for Adam's kind, which has two


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that one rank holds of each parameter of the model, by the kind of memory; a fraction where ranks share."""

    device: float
    host: float
    disk: float

    @property
    def leaves(self) -> bool:
        """Whether anything lives outside the device."""
        return self.host > 0 or self.disk > 0


def widths_of(schema: Schema) -> Widths:
    """Bytes of an element in each role."""
    precision = Precision.from_config(schema)
    optimizer = schema.optimizer
    name, params = str(optimizer.type or "").lower(), optimizer.params or {}
    count = _MOMENTS.get(name.removeprefix("deepspeedcpu").removeprefix("fused"), 2)
    if name == "sgd":
        count = 1 if params.get("momentum") else 0
    bits = params.get("moment_bits")
    width = bits // 8 if bits in (8, 16) else precision.state.itemsize
    away = schema.zero_optimization.offloads_optimizer
    return Widths(
        param=precision.param.itemsize,
        grad=precision.accumulate.itemsize,
        master=precision.master.itemsize if precision.has_master or away else 0,
        optimizer=count * width,
    )


def needs_of(schema: Schema, world: int) -> Needs:
    """The bytes of a parameter on each of `world` ranks."""
    zero, widths = schema.zero_optimization, widths_of(schema)
    stage = int(zero.stage)
    part = {role: 1 / world if stage >= first else 1.0 for role, first in (("states", 1), ("grads", 2), ("params", 3))}
    states = (widths.master + widths.optimizer) * part["states"]
    params, grads = widths.param * part["params"], widths.grad * part["grads"]
    device, host, disk = 0.0, 0.0, 0.0
    tier = OffloadDeviceEnum.none if zero.offload_optimizer is None else zero.offload_optimizer.device
    share = float(zero.offload_optimizer.ratio) if zero.offload_optimizer is not None else 0.0
    if tier is OffloadDeviceEnum.none:
        device += states + grads
    else:
        once = (schema.gradient_accumulation_steps or 1) == 1
        device += states * (1 - share) + (0.0 if once else grads)
        host += share * (widths.param if once else widths.grad) * part["states"]
        if tier is OffloadDeviceEnum.cpu:
            host += share * states
        else:
            disk += share * states
    home = OffloadDeviceEnum.none if zero.offload_param is None else zero.offload_param.device
    if stage < 3 or home is OffloadDeviceEnum.none:
        device += params
    elif home is OffloadDeviceEnum.cpu:
        host += params
    else:
        disk += params
    return Needs(device, host, disk)
