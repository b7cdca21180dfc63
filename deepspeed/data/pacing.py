"""`Pacing`: what of a forward pass changes with the step; the engine asks it before each pass in training."""

from __future__ import annotations

import inspect
import random
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from deepspeed.config.schema import Schema
from deepspeed.data.curriculum import CurriculumScheduler, Ramp, cut_to_length
from deepspeed.data.random_ltd import RandomLTDScheduler, join_layers
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.transformers.replacement import put_attribute

__all__ = [
    "BlockDrop",
    "NumberedBlocks",
    "Pacing",
    "ProgressiveLayerDrop",
    "StepState",
    "pacing_of",
    "set_custom_schedules",
]

Read = Callable[[nn.Parameter], Tensor | None]
"""Finds the whole gradient or the whole value of a parameter."""


@dataclass(frozen=True)
class NumberedBlocks:
    """The blocks of a model that lie on this rank, with their numbers, and how many the whole model has."""

    here: Sequence[tuple[int, nn.Module]]
    total: int


class StepState(Protocol):
    """What is another in each step, and follows from the number of steps."""

    def enter(self, step: int) -> None:
        """A pass of `step` optimizer steps before begins."""

    def before_backward(self, loss: Tensor, scale: float) -> None:
        """The backward of the last micro-batch of a step comes next, with a loss scale."""

    def state_dict(self) -> dict[str, Any]:
        """What does not follow from the number of steps."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was taken."""

    def before_step(self, gradient: Read, value: Read) -> None:
        """An optimizer step comes next; each reads what is whole on all ranks together."""


@dataclass
class Pacing:
    """Length of sequences, dropped layers and kept tokens, by the step; a part that is None is off."""

    curriculum: CurriculumScheduler | None = None
    cuts: bool = False
    """Batches are cut to the curriculum's length here."""
    tells_length: bool = False
    """The forward gets `curriculum_seqlen`."""
    layer_drop: ProgressiveLayerDrop | None = None
    block_drop: BlockDrop | None = None
    tokens: RandomLTDScheduler | None = None
    compression: StepState | None = None
    """How the weights of layers are compressed."""
    rank: int = 0
    """This rank among those that have other samples."""
    _length: int | None = field(default=None, init=False)

    def enter(self, step: int, micro_step: int) -> bool:
        """A pass of `step` optimizer steps before begins; true if the sequences of a pipeline have another length."""
        if self.layer_drop is not None:
            self.layer_drop.update_state(step)
            if self.block_drop is not None:
                self.block_drop.choose(self.layer_drop.get_theta(), micro_step)
        if self.tokens is not None:
            self.tokens.update_seq(step)
            self.tokens.draw = (micro_step, self.rank)
        if self.compression is not None:
            self.compression.enter(step)
        before = self._length
        if self.curriculum is not None:
            self._length = self.curriculum.update_difficulty(step + 1)
        return self._length != before

    def went_to(self, step: int) -> None:
        """So many optimizer steps are over: evaluation, too, computes with the compression of that step."""
        if self.compression is not None:
            self.compression.enter(step)

    def before_backward(self, loss: Tensor, scale: float) -> None:
        """The backward of the last micro-batch of a step comes next."""
        if self.compression is not None:
            self.compression.before_backward(loss, scale)

    def before_step(self, gradient: Read, value: Read) -> None:
        """An optimizer step comes next."""
        if self.compression is not None:
            self.compression.before_step(gradient, value)

    def cut(self, batch: Any) -> Any:
        """The batch in the length of this step."""
        return cut_to_length(batch, self._length) if self.cuts and self._length is not None else batch

    def arguments(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the forward in this step."""
        if self.cuts:
            inputs, kwargs = self.cut((inputs, kwargs))
        if self.tells_length:
            kwargs = {**kwargs, "curriculum_seqlen": self._length}
        if self.layer_drop is not None and self.block_drop is None:
            kwargs = {**kwargs, **self.layer_drop.get_state()}
        return inputs, kwargs

    def state_dict(self) -> dict[str, Any]:
        """What does not follow from the number of steps."""
        both = {"random_ltd": self.tokens, "compression": self.compression}
        states = {name: each.state_dict() for name, each in both.items() if each is not None}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was taken."""
        if self.tokens is not None and "random_ltd" in state:
            self.tokens.load_state_dict(state["random_ltd"])
        if self.compression is not None and "compression" in state:
            self.compression.load_state_dict(state["compression"])


def pacing_of(
    schema: Schema,
    module: nn.Module,
    blocks: Callable[[], NumberedBlocks],
    *,
    whole: bool,
    rank: int,
    samples: int,
    stack: ExitStack,
) -> Pacing | None:
    """What the config asks for; None where nothing changes with the step. `whole`: the module is no pipeline.

    `rank` is this rank's number among those with other samples, and `samples` the size of a batch of all of them.
    """
    found = Pacing(rank=rank)
    routing = schema.data_efficiency.random_ltd
    if routing is not None:
        here = None if whole else [number for number, _ in blocks().here]
        found.tokens = join_layers(module, routing, samples, here)
    legacy, drop = schema.curriculum_learning, schema.progressive_layer_drop
    if legacy.enabled:
        found.curriculum, found.cuts = CurriculumScheduler(legacy), legacy.cut_batches
        found.tells_length = whole and not legacy.cut_batches and legacy.curriculum_type == "seqlen"
        if found.tells_length:
            _require_arguments(module, ("curriculum_seqlen",), "curriculum_learning.cut_batches")
    if drop.enabled:
        found.layer_drop = ProgressiveLayerDrop(drop.theta, drop.gamma)
        if drop.drop_blocks:
            each = _named(module, drop.blocks) if drop.blocks else blocks()
            found.block_drop = BlockDrop(each.here, each.total, drop.seed)
            stack.callback(found.block_drop.close)
        elif not whole:
            raise DeepSpeedConfigError(
                "progressive_layer_drop.enabled is true, and the layers of a pipeline take no keyword arguments; set "
                "progressive_layer_drop.drop_blocks to true for a model of Transformers, or remove the section",
                path="progressive_layer_drop.enabled",
            )
        else:
            _require_arguments(module, ("progressive_layer_drop", "pld_theta"), "progressive_layer_drop.drop_blocks")
    return found if legacy.enabled or drop.enabled or routing is not None else None


def set_custom_schedules(schedules: Mapping[str, Callable[[int], int]], pacing: Pacing | None, loader: Any) -> None:
    """Give functions to the schedules of these names that are custom."""
    known: dict[str, CurriculumScheduler] = dict(getattr(loader, "curriculum_schedulers", {}))
    if pacing is not None and pacing.curriculum is not None:
        known["seqlen"] = pacing.curriculum
    custom = {name: each for name, each in known.items() if each.schedule.schedule_type == "custom"}
    for name, function in schedules.items():
        if name not in custom:
            raise UsageError(
                f"set_custom_curriculum_learning_schedule: {name!r} is no metric with schedule_type custom; those are "
                f"{', '.join(custom) or 'none'}"
            )
        custom[name].set_custom_get_difficulty(function)


def _named(module: nn.Module, paths: Sequence[str]) -> NumberedBlocks:
    known = dict(module.named_modules())
    for path in paths:
        if not isinstance(known.get(path), (nn.ModuleList, nn.Sequential)):
            lists = [name for name, each in known.items() if isinstance(each, (nn.ModuleList, nn.Sequential))]
            raise DeepSpeedConfigError(
                f"progressive_layer_drop.blocks: the model has no list of modules {path!r}; its lists are "
                f"{', '.join(lists) or 'none'}",
                path="progressive_layer_drop.blocks",
            )
    found = [block for path in paths for block in known[path].children()]
    return NumberedBlocks(list(enumerate(found)), len(found))


def _require_arguments(module: nn.Module, names: Sequence[str], instead: str) -> None:
    """Refuse a model whose forward would not read them: one of Transformers swallows what it does not know."""
    parameters = inspect.signature(module.forward).parameters
    swallows = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    foreign = type(module).__module__.startswith("transformers.")
    missing = [name for name in names if name not in parameters]
    if missing and (foreign or not swallows):
        section = instead.partition(".")[0]
        raise DeepSpeedConfigError(
            f"{section}.enabled is true, but {type(module).__name__}.forward does not take {', '.join(missing)}. "
            f"Set {instead} to true, so that the engine does it, or let the forward take them",
            path=instead,
        )


class ProgressiveLayerDrop:
    """Theta, the share of layers that are kept: (1 − theta) exp(−gamma t) + theta at step t."""

    def __init__(self, theta: float = 0.5, gamma: float = 0.001) -> None:
        self.theta, self.gamma = theta, gamma
        self._ramp = Ramp.decay(theta, gamma)
        self.current_theta = 1.0

    def get_state(self) -> dict[str, Any]:
        """The keyword arguments of the forward of a model that drops layers."""
        return {"progressive_layer_drop": True, "pld_theta": self.get_theta()}

    def get_theta(self) -> float:
        """Theta at the step of the last update."""
        return self.current_theta

    def update_state(self, global_step: int) -> None:
        """Go to a step."""
        self.current_theta = self._ramp.at(global_step)


class BlockDrop:
    """Stochastic depth on residual blocks: block l of L computes with probability 1 − (l / L)(1 − theta).

    [Note: which blocks are dropped]
    A generator of the seed and the micro step chooses, so that all ranks drop the same blocks, which ZeRO and tensor
    parallelism need, a resumed run drops what the unbroken one drops, and the recomputation of a block in backward
    finds the same choice. What a kept block adds to the hidden states is divided by its probability: evaluation,
    which drops nothing, sees the same mean.
    """

    def __init__(self, blocks: Sequence[tuple[int, nn.Module]], total: int, seed: int) -> None:
        self.total, self._seed = total, seed
        self.dropped: frozenset[int] = frozenset()
        self._keep = [1.0] * total
        self._tuples: dict[int, int] = {}
        self._undo = [self._put(number, block) for number, block in blocks]

    def choose(self, theta: float, step: int) -> None:
        """Choose the blocks that a micro step drops."""
        self._keep = [1.0 - (number + 1) / self.total * (1.0 - theta) for number in range(self.total)]
        draws = random.Random(f"{self._seed}/{step}")
        self.dropped = frozenset(number for number, keep in enumerate(self._keep) if draws.random() >= keep)

    def close(self) -> None:
        """Let the blocks compute as their classes do."""
        for undo in reversed(self._undo):
            undo()

    def _put(self, number: int, block: nn.Module) -> Callable[[], None]:
        compute = block.forward

        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not module.training:
                return compute(*args, **kwargs)
            hidden = args[0] if args else kwargs.get("hidden_states")
            if not isinstance(hidden, Tensor):
                raise UsageError(
                    f"progressive_layer_drop.drop_blocks: {type(module).__name__} is called without hidden states as "
                    "its first argument, so that it cannot be dropped; name other lists in "
                    "progressive_layer_drop.blocks"
                )
            if number in self.dropped:
                return self._structure(number, compute, args, kwargs, hidden)
            result = compute(*args, **kwargs)
            keep = self._keep[number]
            self._tuples[number] = len(result) if isinstance(result, tuple) else 0
            if keep == 1.0:
                return result
            new = result[0] if isinstance(result, tuple) else result
            scaled = hidden + (new - hidden) / keep
            return (scaled, *result[1:]) if isinstance(result, tuple) else scaled

        # a compiler sees what the block computes, and the choice stays Python
        forward = torch.compiler.disable(run, recursive=False)
        return put_attribute(block, "forward", types.MethodType(forward, block))

    def _structure(self, number: int, compute: Any, args: Any, kwargs: Any, hidden: Tensor) -> Any:
        """The hidden states in the form in which the block gives its own."""
        if number not in self._tuples:  # never run so far: blocks of a class may differ, and a resumed run begins here
            with torch.no_grad(), torch.random.fork_rng():
                result = compute(*args, **kwargs)
            self._tuples[number] = len(result) if isinstance(result, tuple) else 0
        size = self._tuples[number]
        return (hidden, *[None] * (size - 1)) if size else hidden
