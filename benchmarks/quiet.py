"""A group of any size in one process: torch's fake one, whose collectives are counted and cost one copy at most.

[Note: quiet collectives] torch's fake group copies the input of an all-gather once per rank, one operation each, which
makes every contender's step grow with the number of ranks. Here one operation fills the output with this rank's part,
over and over, for all contenders alike. It is not left out: unwritten memory holds denormal numbers and NaN, on which
processors and overflow checks take other paths. What the copies take is counted, so that a case can subtract it.

All of it happens below the dispatcher, so that whoever calls a collective is seen: this library calls methods of the
group, DeepSpeed functions of torch.distributed, FSDP2 functional collectives, on whichever thread.
"""

from __future__ import annotations

import contextlib
import importlib
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, library

__all__ = ["KINDS", "Traffic", "quiet_group"]

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "reduce", "other")

Tensors = Sequence[Tensor]


@dataclass
class Traffic:
    """Collectives of this rank since the last `clear`: how many, and the bytes it sends, and receives, in a ring."""

    calls: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0  # inside them, on the host

    def clear(self) -> None:
        self.calls.clear()
        self.sent.clear()
        self.seconds = 0.0


class _Sent(dist.Work):
    """A collective on its way on a stream of its own; as with NCCL, to wait for it is to make one's stream wait."""

    def __init__(self, event: Any = None, tensors: Tensors = ()) -> None:
        super().__init__()
        self._event = event
        self._tensors: Tensors | None = tensors

    def wait(self, timeout: Any = None) -> bool:
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        self._tensors = None  # nobody's memory until now: the allocator must not give it away before
        return True

    def is_completed(self) -> bool:
        return self._event is None or bool(self._event.query())

    def get_future(self) -> Any:
        done: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        done.set_result([])
        return done


@dataclass(frozen=True)
class _Operation:
    """An operation of torch.ops.c10d. Its arguments: outputs (or what is both), inputs where it has them, the group."""

    kind: str
    ring: Callable[[int, int, int], float]  # (bytes of outputs, bytes of inputs, ranks) → bytes that a rank sends
    fill: Callable[[list[Tensor], list[Tensor]], None] | None = None
    inputs: bool = True
    asynchronous: int | None = None  # the argument that says whether somebody will wait
    returns: bool = False  # the outputs too


def _repeat(outputs: list[Tensor], inputs: list[Tensor]) -> None:
    """This rank's part for everybody's; outputs are whole, or one per rank."""
    if len(outputs) > len(inputs):
        share = len(outputs) // len(inputs)
        for index, output in enumerate(outputs):
            output.copy_(inputs[index // share])
        return
    for output, part in zip(outputs, inputs, strict=True):
        if part.numel():
            rows = output.view(-1, part.numel())  # [ranks, part]
            lies_there = rows.data_ptr() == part.data_ptr()
            (rows[1:] if lies_there else rows).copy_(part.view(-1))


def _take(outputs: list[Tensor], inputs: list[Tensor]) -> None:
    """The first rank's part of whole inputs, or of one per rank."""
    share = len(inputs) // len(outputs)
    for index, output in enumerate(outputs):
        whole = inputs[index * share].reshape(-1)
        output.copy_(whole[: output.numel()].view_as(output))


def _same(outputs: list[Tensor], inputs: list[Tensor]) -> None:
    """Others send what this rank sends."""
    for output, part in zip(outputs, inputs, strict=False):
        if output.numel() == part.numel():
            output.copy_(part.view_as(output))


def _zeros(outputs: list[Tensor], inputs: list[Tensor]) -> None:
    """Nobody knows what another one would send; unwritten memory may hold NaN."""
    for output in outputs:
        output.zero_()


def _gathering(asynchronous: int | None = 3, returns: bool = False) -> _Operation:
    return _Operation("all-gather", lambda out, part, _: out - part, _repeat, True, asynchronous, returns)


def _scattering(returns: bool = False) -> _Operation:
    return _Operation("reduce-scatter", lambda out, whole, _: whole - out, _take, True, 4, returns)


def _all_reducing(asynchronous: int, returns: bool = False) -> _Operation:
    return _Operation("all-reduce", lambda out, _, n: 2 * out * (n - 1) / n, None, False, asynchronous, returns)


def _swapping(asynchronous: int, returns: bool = False) -> _Operation:
    return _Operation("other", lambda out, _, n: out * (n - 1) / n, _same, True, asynchronous, returns)


def _moving(asynchronous: int | None, returns: bool = False, inputs: bool = False, kind: str = "other") -> _Operation:
    return _Operation(kind, lambda out, _, n: out if n > 1 else 0, None, inputs, asynchronous, returns)


def _waiting() -> _Operation:
    return _Operation("other", lambda *_: 0.0, None, False)


def _receiving() -> _Operation:
    return _Operation("other", lambda *_: 0.0, _zeros, False)


_OPERATIONS = {
    "_allgather_base_": _gathering(returns=True),
    "allgather_": _gathering(returns=True),
    "allgather_coalesced_": _gathering(),
    "allgather_into_tensor_coalesced_": _gathering(),
    "_reduce_scatter_base_": _scattering(returns=True),
    "reduce_scatter_": _scattering(returns=True),
    "reduce_scatter_tensor_coalesced_": _scattering(),
    "allreduce_": _all_reducing(4, returns=True),
    "allreduce_coalesced_": _all_reducing(3),
    "alltoall_base_": _swapping(5),
    "alltoall_": _swapping(3, returns=True),
    "broadcast_": _moving(4, returns=True),
    "reduce_": _moving(5, kind="reduce"),
    "gather_": _moving(4, inputs=True),
    "scatter_": _moving(4, returns=True, inputs=True),
    "send": _moving(None),
    "recv_": _receiving(),
    "recv_any_source_": _receiving(),
    "barrier": _waiting(),
}


def _flat(argument: Any) -> list[Tensor]:
    """The tensors of a tensor, a list of them, or a list of lists."""
    if isinstance(argument, Tensor):
        return [argument]
    return [tensor for part in argument for tensor in _flat(part)]


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class _Kernels:
    """What stands in the place of the operations."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._done = _Sent()
        self._alive: list[_Sent] = []  # C++ calls back into works that Python has let go of
        self._wire: Any = None

    def kernel(self, operation: _Operation) -> Callable[..., Any]:
        """The operation's new implementation."""

        def run(*arguments: Any) -> Any:
            began = time.perf_counter()
            outputs = _flat(arguments[0])
            inputs = _flat(arguments[1]) if operation.inputs else []
            ranks = dist.ProcessGroup.unbox(arguments[1 + operation.inputs]).size()
            self._traffic.calls[operation.kind] += 1
            self._traffic.sent[operation.kind] += int(operation.ring(_bytes(outputs), _bytes(inputs), ranks))
            at = operation.asynchronous
            waited = at is not None and (len(arguments) <= at or bool(arguments[at]))
            work = self._fill(operation, outputs, inputs, waited).boxed()
            self._traffic.seconds += time.perf_counter() - began
            return (arguments[0], work) if operation.returns else work

        return run

    def _fill(self, operation: _Operation, outputs: list[Tensor], inputs: list[Tensor], waited: bool) -> _Sent:
        if operation.fill is None or not outputs:
            return self._done
        if not waited or outputs[0].device.type != "cuda":
            with torch.no_grad():
                operation.fill(outputs, inputs)
            return self._done
        if self._wire is None:
            self._wire = torch.cuda.Stream()
        self._wire.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._wire), torch.no_grad():
            operation.fill(outputs, inputs)
        sent = _Sent(self._wire.record_event(), (*outputs, *inputs))
        self._alive.append(sent)
        return sent


@contextlib.contextmanager
def quiet_group(world: int, device: str = "cpu") -> Iterator[Traffic]:
    """This process as rank 0 of `world` ranks, and what it sends to them; see [Note: quiet collectives]."""
    # torch registers the backend when this is imported
    fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    traffic = Traffic()
    kernels = _Kernels(traffic)
    dist.init_process_group("fake", rank=0, world_size=world, store=fake.FakeStore())
    try:
        with library._scoped_library("c10d", "IMPL") as ours:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that kernels are replaced is what is wanted
                for name, operation in _OPERATIONS.items():
                    for key in ("CPU", "CUDA") if device == "cuda" else ("CPU",):
                        ours.impl(name, kernels.kernel(operation), key)
            yield traffic
    finally:
        dist.destroy_process_group()
