"""From a config and a model to the reducer of whole gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepspeed.precision.policy import Precision
from deepspeed.runtime.reduction.reducer import GradientReducer, Over, Slot
from deepspeed.runtime.reduction.sparse import embedding_parameters
from deepspeed.zero.gradients.reduction import Weights
from deepspeed.zero.states.norm import Measure
from deepspeed.zero.states.states import States

if TYPE_CHECKING:
    from deepspeed.config.schema import Schema

__all__ = ["build_reducer", "extend_reducer"]


def build_reducer(
    schema: Schema, module: nn.Module, measure: Measure, precision: Precision, states: States | None
) -> GradientReducer:
    """The reducer of a module whose parameters are whole on every rank that they lie on."""
    sparse, rows = embedding_parameters(module, all_rows=schema.sparse_gradients)
    axis = measure.axis
    slots = _slots(list(module.named_parameters()), module, precision, states)
    holder_of = states.holder if states is not None else None
    group_of = partial(_group_of, measure) if measure.parted else None
    group = axis.group if axis.size > 1 else None
    over = Over(group, axis.size, Weights.of(schema, axis.size), group_of)
    return GradientReducer(slots, over, sparse, rows, holder_of)


def _group_of(measure: Measure, param: nn.Parameter) -> Any:
    """The process group over which a parameter's gradients are summed; None: this rank alone holds it."""
    axis = measure.ranks_of(param)
    return axis.group if axis.size > 1 else None


def extend_reducer(
    reducer: GradientReducer,
    named: Sequence[tuple[str, nn.Parameter]],
    module: nn.Module,
    precision: Precision,
    states: States,
) -> None:
    """Reduce parameters that are new to the engine, too."""
    known = {id(slot.param) for slot in reducer.slots}
    reducer.add(_slots([each for each in named if id(each[1]) not in known], module, precision, states))


def _slots(
    named: Sequence[tuple[str, nn.Parameter]], module: nn.Module, precision: Precision, states: States | None
) -> list[Slot]:
    travels = precision.reduce_dtypes(module)
    slots = []
    for name, param in named:
        wide = states is not None and param.dtype != precision.accumulate and param.is_floating_point()
        holder = states.holder(param) if wide and states is not None else param
        own = param.dtype if param.dtype == torch.float32 and precision.param != torch.float32 else precision.reduce
        slots.append(Slot(name, param, holder, travels.get(param, own)))
    return slots
