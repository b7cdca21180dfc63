"""Graphs of the device: a function captured once for each shape of its inputs, and replayed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from deepspeed.accelerator import get_accelerator
from deepspeed.log import logger

_WARM_UPS = 2


class GraphPool:
    """Captured calls by key, the least recently used of them dropped beyond a number; they share memory."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: OrderedDict[Hashable, tuple[Any, Any]] = OrderedDict()
        self._memory: Any = None

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._held

    def run(self, key: Hashable, call: Callable[[], Any]) -> Any:
        """Replay what `call` did at this key, or capture it; returns the tensors that the graph writes."""
        found = self._held.get(key)
        if found is None:
            found = self._capture(call)
            self._held[key] = found
            if len(self._held) > self._most:
                self._held.popitem(last=False)
        self._held.move_to_end(key)
        get_accelerator().replay_graph(found[0])
        return found[1]

    def _capture(self, call: Callable[[], Any]) -> tuple[Any, Any]:
        accelerator = get_accelerator()
        beside = accelerator.Stream()
        beside.wait_stream(accelerator.current_stream())
        with accelerator.stream(beside), torch.no_grad():
            for _ in range(_WARM_UPS):  # kernels compile, libraries choose
                call()
        accelerator.current_stream().wait_stream(beside)
        graph = accelerator.create_graph()
        with torch.no_grad(), accelerator.capture_to_graph(graph, pool=self._memory):
            result = call()
        if self._memory is None:
            self._memory = graph.pool()
        return graph, result

    def clear(self) -> None:
        """Drop all graphs and their memory."""
        self._held.clear()
        self._memory = None


class GraphedModule:
    """A module's forward in graphs, one for each shape of its tensors; other arguments are part of the key."""

    def __init__(self, module: nn.Module, most: int = 16) -> None:
        self._module, self._pool = module, GraphPool(most)
        self._inputs: dict[Hashable, list[Tensor]] = {}
        self._refused: str | None = None

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The results of `forward`, in tensors of their own."""
        leaves, tree = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        key = self._key(leaves, tree)
        device = get_accelerator().device_name()
        on_device = all(tensor.device.type == device for tensor in tensors)
        # autocast drops the weights that it cast when it ends, and a graph would read them afterwards
        eager = self._refused is not None or torch.is_grad_enabled() or torch.is_autocast_enabled(device)
        if key is None or not on_device or eager:
            return forward(*args, **kwargs)
        try:
            result = self._replayed(key, forward, leaves, tree)
        except RuntimeError as error:
            found = forward(*args, **kwargs)  # fails, too, if the inputs are wrong
            self._refused = str(error)
            self.clear()
            logger.warning(
                "%s cannot be captured in a graph and runs without: %.200s", type(self._module).__name__, error
            )
            return found
        flat, shape = tree_flatten(result)
        return tree_unflatten([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in flat], shape)

    @torch.inference_mode(False)  # what is kept is written to later, in whatever mode that is
    @torch.no_grad()
    def _replayed(self, key: Hashable, forward: Callable[..., Any], leaves: list[Any], tree: Any) -> Any:
        """The tensors that the graph of this key writes."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if key not in self._pool:
            self._inputs = {each: held for each, held in self._inputs.items() if each in self._pool}
            self._inputs[key] = [tensor.clone() for tensor in tensors]
        held = self._inputs[key]
        for static, tensor in zip(held, tensors, strict=True):
            static.copy_(tensor, non_blocking=True)
        replaced = iter(held)
        given = [next(replaced) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(given, tree)
        return self._pool.run(key, lambda: forward(*args, **kwargs))

    def clear(self) -> None:
        """Drop all graphs."""
        self._pool.clear()
        self._inputs.clear()

    def _key(self, leaves: list[Any], tree: Any) -> Hashable | None:
        """Shapes of tensors and values of all else; None where something has no value to compare."""
        parts: list[Hashable] = [str(tree), self._module.training]
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                parts.append((leaf.shape, leaf.dtype, leaf.device))
            elif leaf is None or isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device)):
                parts.append((type(leaf), leaf))
            else:
                return None
        return tuple(parts)
