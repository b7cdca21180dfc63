"""Stacked experts of few tokens, as generation has them: only the weights that tokens chose are read, each once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.fusion.equivalence import alike, overridden, stand_in
from deepspeed.ops.generate.experts import routable, routed_experts, routed_experts_reference
from deepspeed.ops.model.gated import ACTIVATIONS
from deepspeed.ops.registry import op
from deepspeed.parallel.regions import cut_of
from deepspeed.transformers.replacement import Refused, Swap, own_product, put_product

NAMES = ("gate_up_proj", "down_proj")
_EXPERTS, _WIDTH, _INNER = 3, 8, 16


def find_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, Swap | Refused]]:
    """(name, module, how it is replaced) for each module of stacked experts; serves generation only."""
    if op("routed_experts") is routed_experts_reference:
        return  # it waits for the device, which no graph can hold
    known: dict[type, str | None] = {}
    for name, module in model.named_modules():
        if not is_stacked(module):
            continue
        if reason := overridden(module):
            yield name, module, Refused(reason)
            continue
        kind = type(module)
        if kind not in known:
            known[kind] = activation_of(module)
        found = known[kind]
        if found is None:
            yield name, module, Refused(f"{kind.__name__} computes something else than one of {', '.join(ACTIVATIONS)}")
        else:
            put = partial(put_product, module, partial(_run, found))
            yield name, module, Swap("weights of the chosen experts streamed", put, serves="infer")


def _run(kind: str, module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    weights = module.gate_up_proj, module.down_proj
    if routable(hidden_states, *weights, top_k_index):
        return routed_experts(hidden_states, *weights, top_k_index, top_k_weights, kind)
    result: Tensor = own_product(module)(module, hidden_states, top_k_index, top_k_weights)
    return result


def is_stacked(module: nn.Module) -> bool:
    """Whether a module has the parameters of stacked experts."""
    return all((held := module._parameters.get(name)) is not None and held.dim() == 3 for name in NAMES)


def activation_of(module: nn.Module) -> str | None:
    """The activation of stacked gated experts, found by trying; None for others."""
    share = cut_of(module)
    if share is not None and not share.plain:
        return None
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(_EXPERTS, 2 * _INNER, _WIDTH, generator=generator)
    down = torch.randn(_EXPERTS, _WIDTH, _INNER, generator=generator)
    x, shares = torch.randn(4, _WIDTH, generator=generator), torch.rand(4, 2, generator=generator)
    chosen = torch.tensor([[0, 2], [2, 1], [0, 1], [2, 0]])
    twin = stand_in(module, {"gate_up_proj": gate_up, "down_proj": down}, {})
    vars(twin)["num_experts"] = _EXPERTS
    for kind in ACTIVATIONS:
        expected = routed_experts_reference(x, gate_up, down, chosen, shares, kind)
        if alike(partial(own_product(module), twin, x, chosen, shares), expected):
            return kind
    return None
