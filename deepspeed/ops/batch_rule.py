"""`BatchRule`: an update rule as it is applied to whole batches, in host memory or on a device.

A rule has its arithmetic over lists of tensors. What a batch asks for besides (a factor, conditions, moments in 8 bits,
copies for the model) is done around it by torch's operations, tensor by tensor and through copies, or by a kernel that
does all of it in one pass over memory: `csrc/host_update.cpp` for the ops `cpu_adam` and the like, `ops/kernels` for
`adam_one_pass` and the like. There gradients are read in the dtype they arrived in, and moments may be 8-bit codes.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from deepspeed.ops import blockwise
from deepspeed.ops.capability import has_cxx_compiler
from deepspeed.ops.model import linear
from deepspeed.ops.moments import wide
from deepspeed.ops.native import library
from deepspeed.ops.one_pass import Conditions
from deepspeed.ops.optimizer import ParameterBatch, contiguous
from deepspeed.ops.precompile import is_placeholder, rehearses
from deepspeed.ops.registry import by_triton, chosen, implementation, implements, op, reference

Numbers = tuple[float, ...]
"""What a rule hands to a kernel."""
Update = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class BatchRule:
    """An update rule that can be applied to a `ParameterBatch`."""

    name: str
    """The op over lists: `op(name)(params, grads, *moments, *arguments(batch, rule))`."""
    oracle: Update
    """Its reference."""
    signed: tuple[bool, ...]
    """Of each moment, whether it can be negative."""
    arguments: Callable[[ParameterBatch, Any], tuple[Any, ...]]
    numbers: Callable[[ParameterBatch, Any], Numbers]
    """The same for kernels."""


def update_(
    rule: BatchRule, batch: ParameterBatch, given: Any, conditions: Conditions | None, *, one_pass: bool
) -> list[Any]:
    """Update a batch in place, by a kernel in one pass over memory or by the op over lists; what the calls returned.

    `given` are the numbers of this update, such as an `AdamRule`. Only a batch in one pass has a factor, outs and
    moments in 8 bits.
    """
    if one_pass or batch.scales:
        results: list[Any] = op(f"{rule.name}_one_pass")(batch, given, conditions)
        return results
    more = () if conditions is None else (conditions,)
    return [op(rule.name)(batch.params, batch.grads, *batch.moments, *rule.arguments(batch, given), *more)]


@torch.no_grad()
def update_by_torch(
    rule: BatchRule, batch: ParameterBatch, given: Any, update: Update, conditions: Conditions | None = None
) -> list[Any]:
    """Gradients times the factor, decoded moments, then `update`; codes and outs afterwards. Returns as `update_`."""
    if conditions is not None and bool(conditions.skip != 0):
        return []
    arguments = rule.arguments(batch, given)
    if batch.factor == 1.0 and conditions is None and not batch.outs and not batch.scales:
        return [update(batch.params, batch.grads, *batch.moments, *arguments)]
    results = []
    for place, param in enumerate(batch.params):
        grad = batch.grads[place]
        if batch.factor != 1.0 or conditions is not None:
            grad = grad.to(wide(param.dtype)) * batch.factor
        if conditions is not None:
            grad = grad / conditions.divisor
        moments = [tensors[place] for tensors in batch.moments]
        scales = [tensors[place] for tensors in batch.scales]
        coded = list(zip(moments, scales, rule.signed, strict=True)) if scales else []
        values = [blockwise.decode(codes, scale, signed=sign).view(param.shape) for codes, scale, sign in coded]
        results.append(update([param], [grad], *([each] for each in values or moments), *arguments))
        for value, (codes, scale, sign) in zip(values, coded, strict=True):
            noise = blockwise.dither(value.numel(), batch.step, signed=sign, device=value.device)
            blockwise.encode(value, codes, scale, signed=sign, dither=noise)
        if batch.outs:
            batch.outs[place].copy_(param)
    return results


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


def takes(batch: ParameterBatch) -> bool:
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


def host_kernel(name: str) -> Callable[[ParameterBatch, Numbers], None]:
    """The kernel of one rule, compiled if need be: updates a batch that `takes` accepts.

    The call releases Python's lock; it uses as many threads as torch does.
    """
    kernel = getattr(library("host_update"), f"host_{name}")
    kernel.argtypes, kernel.restype = (ctypes.POINTER(_Call),), None

    def update(batch: ParameterBatch, numbers: Numbers) -> None:
        call = _Call()
        kept = _fill(call, batch, numbers)
        if not rehearses():
            kernel(call)
        del kept  # the addresses that the kernel has read

    return update


def _fill(call: _Call, batch: ParameterBatch, numbers: Numbers) -> list[array[int]]:
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


def register_on_host(rule: BatchRule) -> None:
    """Register op `cpu_<name>`: `op("cpu_adam")(batch, numbers of the rule)`."""
    name = f"cpu_{rule.name}"
    reference(name)(_by_torch(rule, lambda: rule.oracle))
    implements(name, name="torch")(_by_torch(rule, lambda: op(rule.name)))
    implementation(name, name="native", requires=has_cxx_compiler, rank=20)(lambda: _compiled(rule))


def _compiled(rule: BatchRule) -> Update:
    kernel = host_kernel(rule.name)
    other = _by_torch(rule, lambda: op(rule.name))

    def update(batch: ParameterBatch, given: Any) -> None:
        if takes(batch):
            kernel(batch, rule.numbers(batch, given))
        else:  # float64, or tensors with gaps
            other(batch, given)

    return update


def _by_torch(rule: BatchRule, update: Callable[[], Update]) -> Update:
    def apply(batch: ParameterBatch, given: Any) -> None:
        update_by_torch(rule, batch, given, update())

    return apply


Apply = Callable[[ParameterBatch, Any, Conditions | None], list[Any]]
"""(batch of dense tensors, numbers of the rule, conditions) → what the rule returns of each parameter, if anything."""


@dataclass(frozen=True, slots=True)
class DeviceUpdate:
    """A rule in one pass: `(batch, numbers of the rule, conditions)`, by torch or by a kernel."""

    rule: BatchRule
    kernel: Apply

    def reference(self, batch: ParameterBatch, given: Any, conditions: Conditions | None = None) -> list[Any]:
        return update_by_torch(self.rule, batch, given, self.rule.oracle, conditions)

    @torch.no_grad()
    def triton(self, batch: ParameterBatch, given: Any, conditions: Conditions | None = None) -> list[Any]:
        """By the kernel; what it does not take is copied to where it does."""
        if not batch.params:
            return []
        if not linear.takes(batch.params[0]):  # parameters may lie in host memory beside a device that has kernels
            return self.reference(batch, given, conditions)
        lists = [batch.params, batch.grads, *batch.moments]
        if contiguous([*lists, batch.outs]):
            results = self.kernel(batch, given, conditions)
            # a kernel's writes are not seen by autograd, which would not notice that a saved weight has changed
            increment_version([*batch.params, *batch.outs])
            return results
        params, grads, *moments = [[tensor.contiguous() for tensor in tensors] for tensors in lists]
        sent = replace(batch, params=params, grads=grads, moments=tuple(moments), outs=[])
        results = self.kernel(sent, given, conditions)
        for tensors, computed in zip((batch.params, *batch.moments), (params, *moments), strict=True):
            torch._foreach_copy_(tensors, computed)
        if batch.outs:
            torch._foreach_copy_(batch.outs, batch.params)
        return results


def register_one_pass(rule: BatchRule, kernel: Apply | None = None) -> DeviceUpdate:
    """Register op `<name>_one_pass`: `op("adam_one_pass")(batch, numbers of the rule, conditions)`.

    Without a `kernel` one launch of the rule's body does it.
    """
    made = DeviceUpdate(rule, partial(_launched, rule) if kernel is None else kernel)
    name = f"{rule.name}_one_pass"
    reference(name)(made.reference)
    by_triton(name)(made.triton)
    return made


def _launched(rule: BatchRule, batch: ParameterBatch, given: Any, conditions: Conditions | None) -> list[Any]:
    from deepspeed.ops.kernels.many import Columns, Launch, launch

    launch(Columns.of(batch), Launch(rule.name, rule.numbers(batch, given), batch.factor, batch.step, conditions))
    return []


def has_kernel(rule: BatchRule, device: torch.device) -> bool:
    """True if a kernel updates parameters on such a device; ranks must agree, so that nothing else decides."""
    return (device.type == "cuda" or is_placeholder(device)) and chosen(f"{rule.name}_one_pass") != "reference"
