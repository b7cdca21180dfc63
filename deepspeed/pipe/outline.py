"""Where the blocks of a Transformers decoder are, and what lies before and after them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.errors import UsageError
from deepspeed.pipe.ghosts import BLOCK_INPUT, Call, Ghosts, view_of
from deepspeed.zero.parameters.structure import tensors_in

__all__ = ["Outline", "TiedName", "outline_of"]


@dataclass(frozen=True)
class TiedName:
    """A parameter that a module before the blocks shares with one after them."""

    path: str
    """The module before the blocks, by whose name the parameter goes."""
    attribute: str
    layers: tuple[str, ...] = ()
    """The layers after the blocks that have it, too."""

    @property
    def name(self) -> str:
        """The parameter's name in the whole model."""
        return f"{self.path}.{self.attribute}"


@dataclass(frozen=True)
class Outline:
    """The parts of a model, by their paths."""

    containers: tuple[str, ...]
    """From the model itself, "", down to the module whose forward calls the blocks."""
    blocks: str
    """The list of them."""
    count: int
    before: tuple[str, ...]
    """What has weights and runs before the first block."""
    after: tuple[str, ...]
    """What else has weights outside of the blocks."""
    bare: tuple[str, ...]
    """What has none, such as rotary embeddings; every stage keeps it."""
    ties: tuple[TiedName, ...]


def outline_of(model: nn.Module) -> Outline:
    """The parts of a model; a UsageError says why it cannot be cut."""
    path, blocks = _find_blocks(model)
    containers = tuple(_above(path))
    outside = list(_outside(model, containers, path))
    _require_plain(model, containers, path)
    early = _run_before_blocks(model, containers, path, outside)
    before = tuple(each for each in outside if each in early and _has_state(model, each))
    after = tuple(each for each in outside if each not in early and _has_state(model, each))
    bare = tuple(each for each in outside if each not in before and each not in after)
    ties = tuple(_ties(model, path, before, after))
    return Outline(containers, path, len(blocks), before, after, bare, ties)


def _find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    config: Any = getattr(model, "config", None)
    count = getattr(config, "num_hidden_layers", None)
    lists = [(path, each) for path, each in model.named_modules() if isinstance(each, nn.ModuleList)]
    found = [(path, each) for path, each in lists if len(each) == count and any(True for _ in each.parameters())]
    if len(found) == 1:
        return found[0]
    told = ", ".join(f"{path} ({len(each)})" for path, each in lists) or "none"
    raise UsageError(
        f"PipelineModule cuts an nn.Sequential, a list of layers, or a model of Transformers with one list of blocks; "
        f"{type(model).__name__} has {len(found)} lists with config.num_hidden_layers = {count} blocks. Its lists: "
        f"{told}. Write the model as a list of layers (LayerSpec)"
    )


def _above(path: str) -> Iterator[str]:
    yield ""
    names = path.split(".")[:-1]
    for length in range(1, len(names) + 1):
        yield ".".join(names[:length])


def _outside(model: nn.Module, containers: Sequence[str], blocks: str) -> Iterator[str]:
    for container in containers:
        for name, _ in model.get_submodule(container).named_children():
            path = f"{container}.{name}" if container else name
            if path != blocks and path not in containers:
                yield path


def _require_plain(model: nn.Module, containers: Sequence[str], blocks: str) -> None:
    for container in containers:
        for name, _ in model.get_submodule(container).named_parameters(recurse=False):
            raise UsageError(
                f"the parameter {name!r} of {container or type(model).__name__} belongs to no layer, so that the model "
                "cannot be cut; write it as a list of layers (LayerSpec)"
            )
    owners: dict[int, str] = {}
    for number, block in enumerate(model.get_submodule(blocks).children()):
        for name, param in block.named_parameters():
            if owners.setdefault(id(param), f"{blocks}.{number}") != f"{blocks}.{number}":
                raise UsageError(
                    f"{blocks}.{number}.{name} is shared with {owners[id(param)]}: blocks that share weights are not "
                    "cut. Write the model as a list of layers (TiedLayerSpec)"
                )
    named = list(model.named_parameters())
    sharded = [name for name, param in named if getattr(param, "ds_shape", param.shape) != param.shape]
    if sharded:
        raise UsageError(
            f"{sharded[0]} was sharded by zero.Init when the model was built; a pipeline shards each stage over its "
            "own replicas. Build the model outside of zero.Init"
        )
    meta = [name for name, param in named if param.is_meta]
    if meta:
        raise UsageError(f"{meta[0]} has no values (device meta); build the model on the CPU before it is cut")
    config: Any = model.config
    for key in ("output_router_logits", "layerdrop"):
        if getattr(config, key, None):
            raise UsageError(
                f"config.{key} is {getattr(config, key)!r}, which needs all blocks of {type(model).__name__} in one "
                "place; set it off before the model is cut"
            )


def _has_state(model: nn.Module, path: str) -> bool:
    return bool(model.get_submodule(path).state_dict())


def _run_before_blocks(model: nn.Module, containers: Sequence[str], blocks: str, outside: Sequence[str]) -> set[str]:
    """The modules that the model's forward calls before its first block, found by running it that far."""
    called: set[str] = set()
    ghosts = Ghosts(model.get_submodule(blocks))
    view = view_of(model, containers, {blocks: ghosts.modules})
    handles = [
        model.get_submodule(path).register_forward_pre_hook(lambda *_, path=path: called.add(path)) for path in outside
    ]
    tokens = torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)
    try:
        with torch.random.fork_rng(devices=[]):
            _, calls = ghosts.until(0, view, {BLOCK_INPUT: tokens}, tuples=False)
    finally:
        for handle in handles:
            handle.remove()
    _require_constant(model, calls[0])
    return called


def _require_constant(model: nn.Module, call: Call) -> None:
    if any(isinstance(each, Tensor) and each.requires_grad for each in tensors_in((call.args, call.kwargs))):
        raise UsageError(
            f"{type(model).__name__} gives its blocks more than hidden states that needs a gradient; it cannot be cut. "
            "Write it as a list of layers (LayerSpec)"
        )


def _ties(model: nn.Module, blocks: str, before: Sequence[str], after: Sequence[str]) -> Iterator[TiedName]:
    named: OrderedDict[int, TiedName] = OrderedDict()
    for path in before:
        for name, param in model.get_submodule(path).named_parameters():
            named.setdefault(id(param), TiedName(path, name))
    inside = {id(param) for param in model.get_submodule(blocks).parameters()}
    late: dict[int, list[str]] = {}
    for path in after:
        for name, param in model.get_submodule(path).named_parameters():
            late.setdefault(id(param), []).append(f"{path}.{name}".rpartition(".")[0])
    for key, tie in named.items():
        if key in inside or (key in late and not _all_tied(model, tie.path, late)):
            raise UsageError(f"{tie.name} is shared in a way that cannot be cut; untie it, or write a list of layers")
        if key in late:
            yield replace(tie, layers=tuple(late[key]))
    if inside.intersection(late):
        raise UsageError(f"a block of {blocks} shares a weight with what follows the blocks; that cannot be cut")


def _all_tied(model: nn.Module, path: str, late: Container[int]) -> bool:
    return all(id(param) in late for param in model.get_submodule(path).parameters())
