"""The `expert_parallel` section acts: blocks of experts of a model are found and spread over ranks (AutoEP)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NoReturn

from torch import nn

from deepspeed.config.parallel import ExpertParallelConfig
from deepspeed.config.schema import Schema
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.log import log_dist
from deepspeed.moe.shared_experts import compute_ahead
from deepspeed.moe.stacked_experts import (
    KEY,
    SpreadStack,
    StackedExperts,
    computes_by_flags,
    count_of_stack,
    kind_of,
    spread_stack,
)
from deepspeed.parallel import AxisGroup, ParallelLayout

_SWITCH = "expert_parallel.enabled"


@dataclass(frozen=True)
class ExpertModule:
    """A module of experts that can be spread."""

    path: str
    module: nn.Module
    experts: int
    arguments: tuple[str, ...]


Opened = Callable[[Iterable[nn.Parameter], AxisGroup], AbstractContextManager[None]]
"""A context in which parameters are whole that were constructed in shards; afterwards they lie on the given ranks."""


def spread_blocks(schema: Schema, model: nn.Module, layout: ParallelLayout, opened: Opened) -> None:
    """Let every rank keep its slice of the experts of every block, as the config says; nothing where it is off."""
    section = schema.expert_parallel
    if not section.enabled:
        return
    tensor, share = layout.tensor, _sharing(section, layout)
    found = find_experts(model, section)
    folds = tensor.size > 1 and share is None
    groups = layout.experts(section.autoep_size, data_first=schema.use_data_before_expert_parallelism, fold_tp=folds)
    senders = tensor if folds else layout.alone
    done: set[int] = set()
    for each in found:
        grouped = section.use_grouped_mm and computes_by_flags(each.module)
        with opened(each.module.parameters(recurse=False), groups.edp):
            made = StackedExperts(each.path, each.experts, groups, grouped, each.arguments, senders)
            made.peers = tensor if section.validate_folding_routing and tensor.size > 1 else None
            spread_stack(each.module, made, done, share)
        if groups.ep.size > 1:
            block, _, name = each.path.rpartition(".")
            each.module.beside = compute_ahead(model.get_submodule(block), name)  # type: ignore[assignment]
    own = sum(not each.module.stack.grouped for each in found)  # type: ignore[union-attr]
    log_dist(
        f"expert parallelism over {groups.ep.size} ranks: the experts of {len(found)} blocks, "
        f"{found[0].experts // groups.ep.size} of {found[0].experts} on each rank"
        + (f", each of which {share.size} tensor-parallel ranks share" if share is not None else "")
        + (f"; {own} blocks compute by their own code" if own else "")
    )


def _sharing(section: ExpertParallelConfig, layout: ParallelLayout) -> AxisGroup | None:
    """The ranks that share every expert; None if each expert is one rank's."""
    size, tensor = section.expert_tensor_parallel_size, layout.tensor
    if size not in (1, tensor.size):
        raise DeepSpeedConfigError(
            f"{KEY} is {size}, but there are {tensor.size} tensor-parallel ranks (tensor_parallel.autotp_size). Either "
            f"all of these share every expert ({tensor.size}), or experts are dealt to them (1)",
            path=KEY,
        )
    return tensor if size > 1 else None


def find_experts(model: nn.Module, section: ExpertParallelConfig) -> list[ExpertModule]:
    """Every module of experts, by its structure; what has experts and cannot be spread is an error that names it."""
    found = []
    for path, module in _candidates(model, section):
        if not path:
            _refuse(type(module).__name__, "it is the whole model; put it into a block, with the router that calls it")
        if isinstance(module, SpreadStack):
            _refuse(path, "it is spread already, by an earlier deepspeed.initialize; build the model anew")
        count, arguments = count_of_stack(module), kind_of(module)
        if count is None or arguments is None:
            _refuse(path, "it keeps its experts in no way that can be sliced" if count is None else _called(module))
        if count % section.autoep_size:
            _refuse(path, f"its {count} experts cannot be dealt to {section.autoep_size} ranks (autoep_size) equally")
        _require_plain(path, module, count)
        found.append(ExpertModule(path, module, count, arguments))
    if not found:
        raise DeepSpeedConfigError(
            f"{_SWITCH} is true, but {type(model).__name__} has no module of experts"
            + (" that matches the patterns" if section.moe_layer_pattern or section.expert_pattern else "")
            + ": one with num_experts and parameters of the shape [experts, …]. Turn it off, or correct the patterns",
            path=_SWITCH,
        )
    return found


def _candidates(model: nn.Module, section: ExpertParallelConfig) -> Iterator[tuple[str, nn.Module]]:
    """What holds experts, in stacked parameters or as modules of one class in a list called `experts`."""
    for path, module in model.named_modules():
        block, _, name = path.rpartition(".")
        if section.moe_layer_pattern is not None and re.search(section.moe_layer_pattern, block) is None:
            continue
        if section.expert_pattern is not None and name != section.expert_pattern:
            continue
        kinds = {type(child) for child in module.children()}
        listed = isinstance(module, (nn.ModuleList, nn.ModuleDict)) and len(module) > 1 and len(kinds) == 1
        if count_of_stack(module) is not None or (name == "experts" and listed):
            yield path, module


def _called(module: nn.Module) -> str:
    return (
        f"{type(module).__name__}.forward takes neither (tokens, chosen experts, weights) nor (rows of every expert), "
        "so that nothing tells where tokens go"
    )


def _require_plain(path: str, module: nn.Module, count: int) -> None:
    for name, param in module.named_parameters(recurse=False):
        if not param.is_floating_point():
            _refuse(path, f"{name} is of dtype {param.dtype}, and quantised experts are not spread")
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.dim() and len(buffer) == count:
            _refuse(path, f"its buffer {name} has an entry for each expert, which nobody would keep up to date")


def _refuse(path: str, why: str) -> NoReturn:
    raise DeepSpeedConfigError(f"{_SWITCH}: {path} cannot be spread: {why}", path=_SWITCH)
