"""What routers chose in a step, over all ranks: `RouterStatistics` turns it into events. Nobody waits for it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.events import EventStream, ExpertsUsed, LayerUse, StepFinished
from deepspeed.moe.layer import MoE
from deepspeed.moe.stacked_experts import Listener, SpreadStack
from deepspeed.parallel import AxisGroup


class RouterStatistics:
    """Counts in every forward of training, sums over ranks at the step, and tells when the next one is through.

    All ranks have one, since they sum together. The sum goes to the host behind the step's work.
    """

    def __init__(self, module: nn.Module, axis: AxisGroup) -> None:
        self._axis = axis
        self._layers = dict(_layers(module))
        self._counts: dict[str, Tensor] = {}
        self._unread: tuple[StepFinished, Tensor, Any] | None = None
        self._open = ExitStack()

    def attach(self, events: EventStream) -> RouterStatistics:
        """Listen to every layer until `close`."""
        for path, (layer, _) in self._layers.items():
            layer.listener = Listener(self._count, path)
            self._open.callback(setattr, layer, "listener", None)
        self._open.callback(self._tell, events)
        self._open.callback(events.subscribe(StepFinished, lambda event: self._step(event, events)).close)
        return self

    def close(self) -> None:
        """Tell what is left and stop listening."""
        self._open.close()

    def _count(self, path: str, counts: Tensor, kept: Tensor | None) -> None:
        """[experts + 1]: assignments of each expert, and how many of all were dropped."""
        dropped = torch.zeros_like(counts[:1]) if kept is None else counts.sum() - kept.sum().view(1)
        found = torch.cat((counts, dropped)).detach()
        self._counts[path] = self._counts.get(path, 0) + found

    def _step(self, event: StepFinished, events: EventStream) -> None:
        self._tell(events)
        device = next((each.device for each in self._counts.values()), comm.group_device())
        sizes = {path: count + 1 for path, (_, count) in self._layers.items()}
        nothing = {path: torch.zeros(size, dtype=torch.int64, device=device) for path, size in sizes.items()}
        total = torch.cat(list({**nothing, **self._counts}.values()))
        self._counts.clear()
        if self._axis.size > 1:
            with comm.labelled("statistics of routers"):
                comm.all_reduce(total, group=self._axis.group)
        accelerator = get_accelerator()
        arrived = None
        if accelerator.on_accelerator(total) and not accelerator.is_synchronized_device():
            total, arrived = total.to("cpu", non_blocking=True), accelerator.Event()
            arrived.record()
        self._unread = event, total, arrived

    def _tell(self, events: EventStream) -> None:
        unread, self._unread = self._unread, None
        if unread is None or not events.wants(ExpertsUsed):
            return
        event, total, arrived = unread
        if arrived is not None:
            arrived.synchronize()
        sizes = [count + 1 for _, count in self._layers.values()]
        numbers = [each.tolist() for each in total.split(sizes)]
        uses = {path: LayerUse(tuple(each[:-1]), each[-1]) for path, each in zip(self._layers, numbers, strict=True)}
        events.emit(ExpertsUsed(event.step, event.samples, uses))


def _layers(module: nn.Module) -> Iterable[tuple[str, tuple[Any, int]]]:
    for path, each in module.named_modules():
        if isinstance(each, MoE):
            yield path, (each.deepspeed_moe, each.num_experts)
        elif isinstance(each, SpreadStack):
            yield path, (each, each.stack.experts)
