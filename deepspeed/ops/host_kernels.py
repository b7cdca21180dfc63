"""The compiled update rules of `csrc/host_update.cpp`: batches in, one call each.

The call releases Python's lock; it uses as many threads as torch does.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deepspeed.ops.batch_rule import Numbers
from deepspeed.ops.native import library
from deepspeed.ops.optimizer import Batch

__all__ = ["host_kernel", "takes"]

_NONE, _CODES = 0, 4
_FORMATS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_MOST_NUMBERS = 8


class _Call(ctypes.Structure):
    """As `Call` in the source."""

    _fields_ = (
        ("count", ctypes.c_int64),
        ("numel", ctypes.c_void_p),
        ("params", ctypes.c_void_p),
        ("grads", ctypes.c_void_p),
        ("moments", ctypes.c_void_p * 2),
        ("scales", ctypes.c_void_p * 2),
        ("outs", ctypes.c_void_p),
        ("param_format", ctypes.c_int32),
        ("grad_format", ctypes.c_int32),
        ("moment_format", ctypes.c_int32),
        ("out_format", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("step", ctypes.c_uint32),
        ("factor", ctypes.c_float),
        ("numbers", ctypes.c_float * _MOST_NUMBERS),
    )


def takes(batch: Batch) -> bool:
    """True if the kernels can walk the memory of all tensors: contiguous, on the CPU, of formats that they know."""
    known = frozenset(_FORMATS)
    plain = [batch.params, batch.grads, batch.outs, *batch.scales]
    plain += [] if batch.scales else batch.moments
    coded = batch.moments if batch.scales else ()
    return (
        all(tensors[0].dtype in known for tensors in plain if tensors)
        and len({tensors[0].dtype for tensors in batch.moments}) == 1
        and all(_alike(tensors) for tensors in (*plain, *coded))
    )


def _alike(tensors: Sequence[Tensor]) -> bool:
    dtype = tensors[0].dtype if tensors else None
    return all(each.is_contiguous() and each.is_cpu and each.dtype == dtype for each in tensors)


def host_kernel(name: str) -> Callable[[Batch, Numbers], None]:
    """The kernel of one rule, compiled if need be: updates a batch that `takes` accepts."""
    kernel = getattr(library("host_update"), f"host_{name}")
    kernel.argtypes, kernel.restype = (ctypes.POINTER(_Call),), None

    def update(batch: Batch, numbers: Numbers) -> None:
        call = _Call()
        kept = _fill(call, batch, numbers)
        kernel(call)
        del kept  # the addresses that the kernel has read

    return update


def _fill(call: _Call, batch: Batch, numbers: Numbers) -> list[array[int]]:
    """Describe the batch; what it returns has to live as long as the call."""
    kept: list[array[int]] = []

    def addresses(values: list[int]) -> int:
        kept.append(array("q", values))
        return kept[-1].buffer_info()[0]

    def places(tensors: Sequence[Tensor]) -> int:
        return addresses([tensor.data_ptr() for tensor in tensors])

    call.count = len(batch.params)
    call.numel = addresses([param.numel() for param in batch.params])
    call.params, call.grads = places(batch.params), places(batch.grads)
    for place, moments in enumerate(batch.moments):
        call.moments[place] = places(moments)
    for place, scales in enumerate(batch.scales):
        call.scales[place] = places(scales)
    call.outs = places(batch.outs) if batch.outs else None
    call.param_format, call.grad_format = _FORMATS[batch.params[0].dtype], _FORMATS[batch.grads[0].dtype]
    call.moment_format = _CODES if batch.scales else _FORMATS[batch.moments[0][0].dtype]
    call.out_format = _FORMATS[batch.outs[0].dtype] if batch.outs else _NONE
    call.threads = torch.get_num_threads()
    call.step = batch.step & 0xFFFFFFFF
    call.factor = batch.factor
    for place, number in enumerate(numbers):
        call.numbers[place] = number
    return kept
