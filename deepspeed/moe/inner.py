"""Experts of which tensor-parallel ranks hold parts of the inner width: how their stacked parameters are cut.

Every rank computes a summand of the output, from whole tokens: gate and up give it some inner columns, which the same
rows of down take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor, nn

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.fragments import Split, even, side_by_side

__all__ = ["KEY", "inner_splits", "tell_width"]

KEY = "expert_parallel.expert_tensor_parallel_size"
_WIDTHS = ("intermediate_dim", "intermediate_size", "moe_intermediate_size", "expert_dim", "ffn_hidden_size")

Cuts = list[list[tuple[int, int]]]


def inner_splits(path: str, module: nn.Module, ranks: int, *, grouped: bool) -> dict[str, Split]:
    """How a module's own parameters are cut over ranks, by name; those that stay whole are not in it.

    `grouped`: computed by grouped products here, else by the module's own code. What cannot be cut is an error.
    """
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in module.named_parameters(recurse=False)}
    up = "gate_up_proj" if "gate_up_proj" in shapes else "up_proj"
    known = {up, "down_proj", f"{up}_bias", "down_proj_bias"}
    if not {up, "down_proj"} <= set(shapes) <= known:
        _refuse(path, f"it has the parameters {', '.join(shapes)}; expected gate_up_proj (or up_proj) and down_proj")
    if getattr(module, "has_post_expert_norm", False):
        _refuse(path, "its experts normalise their outputs, of which a rank would have a summand only")
    if "down_proj_bias" in shapes and not grouped:
        _refuse(path, "its own code would add down_proj_bias on every rank; leave expert_parallel.use_grouped_mm on")
    turned = _is_turned(path, module, shapes[up], shapes["down_proj"], parts=2 if up == "gate_up_proj" else 1)
    width = shapes["down_proj"][1 if turned else 2]
    if width < ranks:
        _refuse(path, f"its inner width is {width}, which {ranks} ranks cannot share")
    cuts = _cuts(path, module, width, ranks, gated=up == "gate_up_proj")
    found = {up: Split.of(2 if turned else 1, cuts), "down_proj": Split.of(1 if turned else 2, [even(width, ranks)])}
    if f"{up}_bias" in shapes:
        found[f"{up}_bias"] = Split.of(1, cuts)
    return found


def tell_width(module: nn.Module, whole: int, part: int) -> None:
    """Let the module's own attributes say how wide the experts are here."""
    for name in _WIDTHS:
        if vars(module).get(name) == whole:
            setattr(module, name, part)


def _is_turned(path: str, module: nn.Module, up: tuple[int, ...], down: tuple[int, ...], *, parts: int) -> bool:
    """Whether matrices are [in, out], as the module says or as their shapes tell; up has `parts` × the inner width."""
    straight = up[1] == parts * down[2] and up[2] == down[1]
    turned = up[2] == parts * down[1] and up[1] == down[2]
    told: bool | None = getattr(module, "is_transposed", None)
    if told is None and straight != turned:
        return turned
    if told is None or not (turned if told else straight):
        _refuse(path, f"its parameters have the shapes {up} and {down}, which do not tell its inner width")
    return told


def _cuts(path: str, module: nn.Module, width: int, ranks: int, *, gated: bool) -> Cuts:
    """Where the inner columns of each rank lie in what goes into the activation: found by trying, where that can be."""
    cut = even(width, ranks)
    if not gated:
        act: Callable[[Tensor], Tensor] | None = getattr(module, "act_fn", None)
        ways = [[cut]]
    else:
        act = getattr(module, "_apply_gate", None)
        in_turns = [[(2 * start, 2 * stop) for start, stop in cut]]
        ways = [side_by_side([width, width], ranks), in_turns]
    if act is None:
        return ways[0 if getattr(module, "is_concatenated", True) else -1]
    way = next((way for way in ways if _holds(act, way, cut)), None)
    if way is None:
        _refuse(path, f"what {type(module).__name__} computes between its products is not the same for parts of them")
    return way


@torch.no_grad()
def _holds(act: Callable[[Tensor], Tensor], way: Cuts, cut: list[tuple[int, int]]) -> bool:
    """Whether an activation of a rank's columns is that rank's part of the activation of all."""
    split = Split.of(1, way)
    given = torch.linspace(-3.0, 3.0, 2 * split.total, device="cpu", dtype=torch.float32).view(2, -1)
    whole = act(given.clone())
    for rank, (start, stop) in enumerate(cut):
        part = act(split.cut(given, rank).clone())
        if part.shape != (2, stop - start) or not torch.allclose(part, whole[:, start:stop], rtol=1e-5, atol=1e-6):
            return False
    return True


def _refuse(path: str, why: str) -> NoReturn:
    raise DeepSpeedConfigError(f"{KEY}: {path} cannot be split over tensor-parallel ranks: {why}", path=KEY)
