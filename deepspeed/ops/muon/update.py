"""The Muon update of one parameter, and what the step over many shares with it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.ops.muon.newton_schulz import orthogonalize
from deepspeed.ops.optimizer import wide

__all__ = [
    "MuonRule",
    "adam_update",
    "alike",
    "check_matrix",
    "heads_of",
    "muon_update",
    "orthogonal",
    "orthogonal_or_nan",
]

# Elements that one batched product takes.
_STACKED_ELEMENTS = 2**25


@dataclass(frozen=True, slots=True)
class MuonRule:
    """How a momentum becomes an update: its decay and the iteration that makes it orthogonal."""

    beta: float = 0.95
    ns_steps: int = 5
    nesterov: bool = True
    ns_method: str = "gram"


def muon_update(
    grad: Tensor,
    momentum: Tensor,
    beta: float = 0.95,
    ns_steps: int = 5,
    nesterov: bool = True,
    ns_method: str = "gram",
    is_expert_group: bool = False,
    num_heads: int | None = None,
) -> Tensor:
    """Advance `momentum` in place and return the update: orthogonal, scaled by √max(1, rows/columns).

    A gradient of 3 dims is a batch of matrices, one of 4 or more (a convolution) is flattened to the matrix
    [first dim, rest], and with `is_expert_group` to one such matrix per expert. With `num_heads` the rows are cut into
    as many matrices. A gradient that is not finite leaves the momentum alone and is returned as it is.
    """
    rule = MuonRule(beta, ns_steps, nesterov, ns_method)
    return _update(grad[None], momentum[None], rule, is_expert_group=is_expert_group, num_heads=num_heads)[0]


def alike(keys: Sequence[Hashable], tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """The places of tensors with equal keys, as many together as one batch takes."""
    found: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        found.setdefault(key, []).append(place)
    for places in found.values():
        first = tensors[places[0]]
        # A processor gains nothing from a batch, and a batch is a copy.
        together = 1 if first.device.type == "cpu" else max(1, _STACKED_ELEMENTS // max(1, first.numel()))
        for start in range(0, len(places), together):
            yield places[start : start + together]


@torch.no_grad()
def _update(
    grad: Tensor, momentum: Tensor, rule: MuonRule, *, is_expert_group: bool = False, num_heads: int | None = None
) -> Tensor:
    """The update of equal parameters stacked along the first dim."""
    dtype = wide(grad.dtype)
    g, m = grad.to(dtype), momentum.to(dtype)
    finite = torch.isfinite(g).flatten(1).all(1).view(-1, *(1 for _ in grad.shape[1:]))
    m = torch.where(finite, m.lerp(g, 1 - rule.beta), m)
    momentum.copy_(m)
    direction = g.lerp(m, rule.beta) if rule.nesterov else m
    update = orthogonal(direction, rule, is_expert_group=is_expert_group, num_heads=num_heads)
    return torch.where(finite, update, g).to(grad.dtype)


def orthogonal(
    direction: Tensor, rule: MuonRule, *, is_expert_group: bool = False, num_heads: int | None = None
) -> Tensor:
    """The directions of equal parameters, stacked along the first dim, made orthogonal and scaled."""
    matrices = _as_matrices(direction, is_expert_group=is_expert_group, num_heads=num_heads)
    scale = max(1.0, matrices.size(-2) / max(1, matrices.size(-1))) ** 0.5
    # Tall heads come back transposed, which no view could join.
    update: Tensor = (orthogonalize(matrices, rule.ns_steps, rule.ns_method) * scale).reshape(direction.shape)
    return update


def orthogonal_or_nan(directions: Tensor, rule: MuonRule, *, num_heads: int | None) -> Tensor:
    """As `orthogonal`; NaN for a direction that is not finite."""
    finite = torch.isfinite(directions).flatten(1).all(1)
    updates = orthogonal(directions, rule, num_heads=num_heads)
    return updates.masked_fill_(~finite.view(-1, *(1 for _ in directions.shape[1:])), float("nan"))


def _as_matrices(stacked: Tensor, *, is_expert_group: bool, num_heads: int | None) -> Tensor:
    """[count, *parameter] as [..., rows, columns]."""
    check_matrix(stacked.shape[1:], is_expert_group=is_expert_group, num_heads=num_heads)
    if is_expert_group:
        matrices = stacked.flatten(3)
    elif stacked.ndim > 4:
        matrices = stacked.flatten(2)
    else:
        matrices = stacked
    if num_heads is None:
        return matrices
    rows = matrices.size(-2)
    return matrices.reshape(*matrices.shape[:-2], num_heads, rows // num_heads, matrices.size(-1))


def check_matrix(shape: Sequence[int], *, is_expert_group: bool = False, num_heads: int | None = None) -> None:
    """Refuse a parameter that is no matrix, or does not split into its heads."""
    if len(shape) < 2 + is_expert_group:
        kind = "expert parameters of 3 dims (experts first)" if is_expert_group else "parameters of 2 dims"
        raise ValueError(f"Muon updates {kind} or more, found shape {tuple(shape)}; give it to the Adam half")
    rows = shape[1] if is_expert_group or len(shape) == 3 else shape[0]
    if num_heads is not None and (num_heads < 1 or rows % num_heads):
        raise ValueError(
            f"per-head Muon: {rows} rows of a parameter of shape {tuple(shape)} do not split into {num_heads} heads"
        )


def heads_of(group: Mapping[str, Any], param: Tensor) -> int | None:
    """How many heads the rows of a parameter are cut into."""
    heads: int | None = group.get("num_heads") or getattr(param, "muon_num_heads", None)
    return heads


def adam_update(grad: Tensor, buf1: Tensor, buf2: Tensor, step: int, betas: tuple[float, float], eps: float) -> Tensor:
    """Advance both moments in place and return Adam's bias-corrected direction."""
    buf1.lerp_(grad, 1 - betas[0])
    buf2.lerp_(grad.square(), 1 - betas[1])
    return (buf1 / (1 - betas[0] ** step)) / ((buf2 / (1 - betas[1] ** step)).sqrt() + eps)
