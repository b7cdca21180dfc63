"""Sequences that stay split between the split regions, so that norms and what they save are divided, too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from deepspeed.errors import UsageError
from deepspeed.parallel import AxisGroup
from deepspeed.tensor_parallel.apply import sum_gradient
from deepspeed.tensor_parallel.layer_splits import LayerSplit
from deepspeed.tensor_parallel.layers import SplitSequence, share_of
from deepspeed.tensor_parallel.plan import ModelStage, SplitPlan
from deepspeed.tensor_parallel.rules import SplitKind


class SequenceGathers:
    """Where hidden states enter the split regions of a model whose sequences stay split in between."""

    def __init__(self, sequence: SplitSequence) -> None:
        self._sequence = sequence
        self._hooks: dict[int, RemovableHandle] = {}
        self.blocks: list[nn.Module] = []
        """Modules inside of which hidden states are split."""

    def put(self, container: nn.Module) -> None:
        """Let a module that holds a split region get the whole sequence."""
        hook = _Hidden(self._sequence.enter)
        self._hooks[id(container)] = container.register_forward_pre_hook(hook, with_kwargs=True)

    def take(self, module: nn.Module, stack: ExitStack) -> tuple[Callable[[Tensor], Tensor], int] | None:
        """Let the caller enter by itself until the stack is closed, some tokens at a time; None for other modules.

        Returned are the way in, and how many times more tokens are inside than outside.
        """
        hook = self._hooks.pop(id(module), None)
        if hook is None:
            return None
        hook.remove()
        stack.callback(self.put, module)
        return self._sequence.enter, self._sequence.axis.size


def divide_sequences(
    model: nn.Module, plan: SplitPlan, axis: AxisGroup, piece: ModelStage | None = None
) -> SequenceGathers:
    """Let sequences stay split from the first block to the last; a model that is not built of blocks is an error.

    Of a `piece` of a model what comes from its blocks elsewhere, and what goes there, is split, too.
    """
    sequence = SplitSequence(axis)
    entrances = SequenceGathers(sequence)
    parts = _parts(model, plan)
    if piece is not None and not piece.blocks and not parts:
        return entrances
    owner, blocks = _blocks(model, plan, parts)
    entrances.blocks = blocks
    for path, layers in parts.items():
        entrances.put(model.get_submodule(path))
        for change in layers:
            share = share_of(change.module)
            assert share is not None, "the plan's layers are split"
            share.sequence, share.gate = sequence, None
    inside = {id(p) for path in parts for p in model.get_submodule(path).parameters()}
    biases = [c.module.bias for layers in parts.values() for c in layers if c.kind is SplitKind.ROW]
    outside = [param for block in blocks for param in block.parameters() if id(param) not in inside]
    for param in (*outside, *(bias for bias in biases if isinstance(bias, nn.Parameter))):
        sum_gradient(param, axis, lambda: sequence.active)
    first, last = (blocks[0], blocks[-1]) if piece is None else (piece.first, piece.last)
    for block in blocks:
        arrive = sequence.begin if block is first else sequence.go_on
        if piece is not None or block is first:
            block.register_forward_pre_hook(_Hidden(functools.partial(arrive, block)), with_kwargs=True)
    if last is not None:
        last.register_forward_hook(_Output(sequence.end))
    if piece is None:  # every block of a piece says so itself
        owner.register_forward_hook(sequence.remember)
    return entrances


def _parts(model: nn.Module, plan: SplitPlan) -> dict[str, list[LayerSplit]]:
    """The modules that hold a split region from its first layers to its last, by path."""
    found: dict[str, list[LayerSplit]] = {}
    for change in plan.changes:
        if change.kind is SplitKind.WHOLE_AND_INTO_HEADS:
            raise UsageError(_unfit(change.path, "stays whole among layers that are split"))
        if change in plan.heads or change.kind is SplitKind.VOCABULARY:
            continue
        parent = change.path.rpartition(".")[0]
        if change.kind in (SplitKind.COLUMN, SplitKind.ROW) and not (
            "lora_" in change.path or change.path.endswith("base_layer")
        ):
            found.setdefault(parent, []).append(change)
        elif change.kind not in (SplitKind.WHOLE_INSIDE, SplitKind.WHOLE, SplitKind.HEADS):
            raise UsageError(_unfit(change.path, "is an adapter or its layer"))
    for path, layers in found.items():
        if {change.kind for change in layers} != {SplitKind.COLUMN, SplitKind.ROW} or any(
            "gate_up_proj" in change.splits or change.rule.split_input for change in layers
        ):
            raise UsageError(_unfit(path, "does not hold a split region from its first layers to its last"))
    return found


def _blocks(model: nn.Module, plan: SplitPlan, parts: dict[str, list[LayerSplit]]) -> tuple[nn.Module, list[nn.Module]]:
    """The module that has the blocks, and these in order.

    All parts lie in blocks of one list, as their own children, and each block has some.
    """
    lists = {path.rpartition(".")[0].rpartition(".")[0] for path in parts}
    if len(lists) != 1 or not isinstance(model.get_submodule(next(iter(lists))), nn.ModuleList):
        where = next(iter(parts), type(model).__name__)
        raise UsageError(_unfit(where, "is no child of a block in the model's one list of blocks"))
    above = lists.pop()
    having = {path.rpartition(".")[0] for path in parts}
    for name, _ in model.get_submodule(above).named_children():
        if f"{above}.{name}" not in having:
            raise UsageError(_unfit(f"{above}.{name}", "has no layers that are split"))
    for path in plan.untouched:
        if path.startswith(f"{above}."):
            raise UsageError(_unfit(path, "is an attention that stays whole"))
    return model.get_submodule(above.rpartition(".")[0]), list(model.get_submodule(above).children())


def _unfit(path: str, why: str) -> str:
    return (
        f"tensor_parallel.sequence_parallel: {path} {why}, so that sequences cannot stay split around it. Turn the key "
        "off for this model"
    )


class _Hidden:
    """A pre-hook that changes the hidden states, which are the first argument or called so."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        self.change = change

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (self.change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self.change(kwargs["hidden_states"])}


class _Output:
    """A hook that changes the hidden states that a block returns, alone or first of several."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        self.change = change

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return (self.change(output[0]), *output[1:]) if isinstance(output, tuple) else self.change(output)
