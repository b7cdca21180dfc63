"""Progressive layer drop: theta for models that drop layers themselves, and blocks dropped in models that do not."""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.data.ramp import Ramp
from deepspeed.errors import UsageError
from deepspeed.transformers.replacement import put_attribute

__all__ = ["BlockDrop", "ProgressiveLayerDrop"]


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
