"""Stacked experts of few tokens, as generation has them: only the weights that tokens chose are read, each once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed.fusion.equivalence import alike, attempt, overridden, same, stand_in
from deepspeed.ops.generate.experts import (
    choose_experts,
    choose_reference,
    routable,
    routed_experts,
    routed_experts_reference,
)
from deepspeed.ops.generate.streaming import MOST_ROWS, streamed_linear
from deepspeed.ops.model.gated import ACTIVATIONS
from deepspeed.ops.registry import op
from deepspeed.parallel.regions import cut_of
from deepspeed.transformers.replacement import Refused, Swap, own_product, put_forward, put_product

NAMES = ("gate_up_proj", "down_proj")
_EXPERTS, _WIDTH, _INNER = 3, 8, 16


def find_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, Swap | Refused]]:
    """(name, module, how it is replaced) for each module of stacked experts; serves generation only."""
    if op("routed_experts") is routed_experts_reference:
        return  # it waits for the device, which no graph can hold
    known: dict[type, str | None] = {}
    for name, module in model.named_modules():
        if (form := _router_form(module)) is not None:
            put = partial(put_forward, module, _Router(*form).run)
            yield name, module, Swap("weight streamed, experts chosen in one launch", put, serves="infer")
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


def _router_form(module: nn.Module) -> tuple[bool, bool] | None:
    """(whether shares sum to 1, whether they are float32) of a router by softmax, found by trying; None for others."""
    weight, count = module._parameters.get("weight"), getattr(module, "top_k", None)
    plain = set(module._parameters) == {"weight"} and not module._modules and not module._buffers
    if not plain or weight is None or weight.dim() != 2 or not isinstance(count, int) or overridden(module) is not None:
        return None
    generator = torch.Generator().manual_seed(0)
    x, tried = torch.randn(4, _WIDTH, generator=generator), torch.randn(5, _WIDTH, generator=generator)
    twin = stand_in(module, {"weight": tried}, {})
    vars(twin).update(num_experts=5, hidden_dim=_WIDTH, top_k=2)
    logits = functional.linear(x, tried)
    for normalised in (True, False):
        expected = (logits, *choose_reference(logits, 2, normalised, torch.float32))
        if same(type(module).forward, twin, x, expected):
            twin.to(torch.bfloat16)
            found = attempt(partial(type(module).forward, twin, x.bfloat16()))
            return None if found is None else (normalised, found[1].dtype == torch.float32)
    return None


class _Router:
    """What one router computes of few tokens."""

    def __init__(self, normalised: bool, wide: bool) -> None:
        self.normalised, self.wide = normalised, wide

    def run(self, module: Any, hidden_states: Tensor) -> Any:
        if torch.is_grad_enabled() or hidden_states.numel() > MOST_ROWS * module.weight.shape[1]:
            return type(module).forward(module, hidden_states)
        (logits,) = streamed_linear(hidden_states.reshape(-1, module.weight.shape[1]), [module.weight])
        dtype = torch.float32 if self.wide else logits.dtype
        return logits, *choose_experts(logits, module.top_k, normalised=self.normalised, dtype=dtype)


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
