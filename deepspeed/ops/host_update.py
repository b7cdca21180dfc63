"""Update rules over parameters in host memory, which also do what a `OnePass` asks for: ops `cpu_adam` and the like.

The compiled kernels do everything in one pass over memory; torch's operations go tensor by tensor, through copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed.ops.batch_rule import BatchRule, Update, update_by_torch
from deepspeed.ops.capability import has_cxx_compiler
from deepspeed.ops.host_kernels import host_kernel, takes
from deepspeed.ops.optimizer import Batch
from deepspeed.ops.registry import implementation, op

__all__ = ["register"]

BatchUpdate = Callable[[Batch, Any], None]


def register(rule: BatchRule) -> None:
    """Register op `cpu_<name>`: `op("cpu_adam")(batch, numbers of the rule)`."""
    name = f"cpu_{rule.name}"
    implementation(name, name="reference", rank=0)(lambda: _by_torch(rule, lambda: rule.oracle))
    implementation(name, name="torch", rank=10)(lambda: _by_torch(rule, lambda: op(rule.name)))
    implementation(name, name="native", requires=has_cxx_compiler, rank=20)(lambda: _compiled(rule))


def _compiled(rule: BatchRule) -> BatchUpdate:
    kernel = host_kernel(rule.name)
    other = _by_torch(rule, lambda: op(rule.name))

    def update(batch: Batch, given: Any) -> None:
        if takes(batch):
            kernel(batch, rule.numbers(batch, given))
        else:  # float64, or tensors with gaps
            other(batch, given)

    return update


def _by_torch(rule: BatchRule, update: Callable[[], Update]) -> BatchUpdate:
    def apply(batch: Batch, given: Any) -> None:
        update_by_torch(rule, batch, given, update())

    return apply
