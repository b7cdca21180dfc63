"""The whole model on the first rank: what every stage has of it, by the names of the whole model."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from deepspeed import comm
from deepspeed.parallel import AxisGroup
from deepspeed.pipe.forms import Form, flatten, unflatten
from deepspeed.runtime.parts import Parts
from deepspeed.runtime.saving.model_state import collect, gather_experts

__all__ = ["whole_state"]


def whole_state(parts: Parts, *, exclude_frozen: bool) -> dict[str, Any] | None:
    """Host copies of everything in the model's state dict on rank 0; None on other ranks, all of which help."""
    layout, experts = parts.layout, parts.experts
    leads = layout["dp", "sp"].rank == 0 and layout["tp"].rank == 0
    found = collect(parts.module, keep=leads or experts is not None, exclude_frozen=exclude_frozen)
    if experts is not None:
        assert found is not None, "every rank keeps its experts"
        gather_experts(found, experts, keep=leads)
    if not leads:
        return None
    assert found is not None, "this rank keeps it"
    return _to_first(found, layout["pp"], parts.device)


def _to_first(state: OrderedDict[str, Any], stages: AxisGroup, device: torch.device) -> dict[str, Any] | None:
    """Stage by stage, so that the first rank holds one message at a time."""
    with comm.labelled("weights of the stages"):
        if stages.rank > 0:
            _send(state, stages, device)
            return None
        for stage in range(1, stages.size):
            for name, value in _receive(stage, stages, device).items():
                state.setdefault(name, value)
    return state


def _send(state: OrderedDict[str, Any], stages: AxisGroup, device: torch.device) -> None:
    form, tensors = flatten(dict(state))
    text = torch.tensor(list(form.text().encode()), dtype=torch.uint8, device=device)
    for each in (torch.tensor([text.numel()], device=device), text, *tensors):
        if each.numel():
            data = each.detach().to(device).contiguous().view(-1).view(torch.uint8)
            comm.send(data, stages.ranks[0], stages.group)


def _receive(stage: int, stages: AxisGroup, device: torch.device) -> dict[str, Any]:
    def hear(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        told = torch.empty(shape, dtype=dtype, device=device)
        if told.numel():
            comm.recv(told.view(-1).view(torch.uint8), stages.ranks[stage], stages.group)
        return told

    size = int(hear((1,), torch.int64))
    form = Form.parse(bytes(hear((size,), torch.uint8).tolist()).decode())
    found: dict[str, Any] = unflatten(form, [hear(kind.shape, kind.dtype).cpu() for kind in form.kinds])
    return found
