"""`Counter`: operations as torch dispatches them, each added to the module that is running; `work_of`: what one costs.

Products of matrices, convolutions and attention cost what torch's own formulas and those here say, at two operations
per multiplication with an addition; a normalisation its passes over the elements; everything that computes element by
element one operation per element; copies, views and look-ups nothing. What works in place costs the same.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from deepspeed.accelerator import get_accelerator
from deepspeed.events import AHEAD
from deepspeed.profiling.common import leave

_ENTER, _EXIT = torch.ops.profiler._record_function_enter_new, torch.ops.profiler._record_function_exit
_PARTS = torch._C.DispatchKey.CompositeImplicitAutograd


class Counter(TorchDispatchMode):
    """While it is entered, hands the work of every operation to `add`."""

    def __init__(self, add: Callable[[Work], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.add = add
        self._ranges: list[str] = []
        self._fast = True

    def begin(self) -> None:
        """Enter, with encoder layers in parts: in one piece each would be a single operation that nobody counts."""
        self._fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Leave; the last one that counts puts torch's switch back as the first one found it."""
        counters = _counters()
        if counters == [self]:
            torch.backends.mha.set_fastpath_enabled(self._fast)
        elif counters and counters[0] is self:
            counters[1]._fast = self._fast
        leave(self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.is_inference_mode_enabled() and _is_made_of_others(func):
            with self:  # which sees the parts of the layer that torch hands over as a whole in this mode
                return func._op_dk(_PARTS, *args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket is _ENTER:
            self._ranges.append(args[0])
        elif func._overloadpacket is _EXIT and self._ranges:
            self._ranges.pop()
        if AHEAD in self._ranges:  # work of the backward is not that of the forward
            return out
        work = work_of(func._overloadpacket, args, kwargs or {}, out)
        if work[0]:
            self.add(work)
        return out


def _counters() -> list[Counter]:
    """Those that are entered, the outermost first."""
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Counter)]


@functools.cache
def _is_made_of_others(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _PARTS)


def wrapFunc(func: Callable[..., Any], funcFlopCompute: Callable[..., Work]) -> Callable[..., Any]:
    """`func`, whose cost counts in a running profile: funcFlopCompute(*args, **kwargs) → (flops, MACs).

    For kernels of one's own, whose operations torch does not see.
    """

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        for counter in _counters()[-1:]:
            counter.add(funcFlopCompute(*args, **kwargs))
        return func(*args, **kwargs)

    return call


Work = tuple[float, float]
"""(operations, multiplications with an addition among them)"""

aten = torch.ops.aten
# Normalisations: passes over the input without a weight, one more with it, and where among the arguments that is.
_PASSES = {
    getattr(aten, name): numbers
    for names, numbers in (
        ("native_layer_norm", (4, 2)),
        ("native_group_norm", (4, 1)),
        (
            "native_batch_norm _native_batch_norm_legit _batch_norm_with_update cudnn_batch_norm miopen_batch_norm",
            (4, 1),
        ),
        ("_fused_rms_norm", (3, 2)),
    )
    for name in names.split()
    if hasattr(aten, name)
}

_REDUCTIONS = """
    sum nansum mean amax amin aminmax argmax argmin max min prod var var_mean std std_mean norm linalg_vector_norm
    logsumexp cumsum cumprod logcumsumexp
    nll_loss_forward nll_loss2d_forward mse_loss smooth_l1_loss huber_loss binary_cross_entropy
    binary_cross_entropy_with_logits soft_margin_loss
    avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d max_pool2d_with_indices max_pool3d_with_indices
    adaptive_max_pool2d adaptive_max_pool3d
"""
# besides those that torch's own tag names
_ELEMENTWISE = """
    glu hardswish mish log_sigmoid_forward _prelu_kernel rrelu_with_noise _softmax _log_softmax native_dropout
    floor_divide upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
    upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
"""
_COPIES = "clone masked_fill positive"


def _packets(names: str) -> frozenset[Any]:
    return frozenset(getattr(aten, name) for name in names.split() if hasattr(aten, name))


# What computes once for each element of its input, and of its output; and what torch tags as such but only copies.
_BY_INPUT, _BY_OUTPUT, _FREE = _packets(_REDUCTIONS), _packets(_ELEMENTWISE), _packets(_COPIES)


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> int:
    return query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _groups(left: Tensor, right: Tensor, *_: Any) -> int:
    """Rows, columns or what is summed are spread over groups, unless both have a dimension for them."""
    both = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return both * left.shape[-2] * left.shape[-1] * right.shape[-1]


# Of a recurrent cell, for each hidden number: additions, activations and products element by element, which torch
# computes one by one where no library has the whole layer. By the number of the cell: ReLU, tanh, LSTM, GRU.
_CELLS = (2, 2, 13, 10)


def _recurrent(x: Tensor, weights: Sequence[Tensor], cell: int, hidden: int) -> Work:
    """Every matrix is multiplied with every step of every sample; biases are no matrices."""
    macs = x.shape[:-1].numel() * sum(weight.numel() for weight in weights if weight.dim() == 2)
    return 2.0 * macs + x.shape[:-1].numel() * _CELLS[cell] * hidden, float(macs)


# Whole layers of libraries, by name: the first is called for each layer and direction, the others once.
_LAYERS: dict[str, Callable[..., Work]] = {
    "mkldnn_rnn_layer": lambda x, *a: _recurrent(x, a[:2], a[8], a[9]),
    "_cudnn_rnn": lambda x, weights, *a: _recurrent(x, weights, a[4], a[5] * a[7] * (1 + a[11])),
    "miopen_rnn": lambda x, weights, *a: _recurrent(x, weights, a[3], a[4] * a[5] * (1 + a[9])),
}
_WHOLE = {getattr(aten, name): formula for name, formula in _LAYERS.items() if hasattr(aten, name)}
# Multiplications with an addition of products that torch's own table does not know, by name.
_PRODUCTS: dict[str, Callable[..., int]] = {
    "mv": lambda matrix, vector: matrix.numel(),
    "addmv": lambda added, matrix, vector: matrix.numel(),
    "dot": lambda left, right: left.numel(),
    "vdot": lambda left, right: left.numel(),
    "addr": lambda added, left, right: left.numel() * right.numel(),
    "addbmm": lambda added, left, right: left.numel() * right.shape[-1],
    "_int_mm": _groups,
    "_scaled_mm_v2": _groups,
    "_grouped_mm": _groups,
    "_scaled_grouped_mm": _groups,
    "_scaled_grouped_mm_v2": _groups,
    "_trilinear": lambda left, weight, right, *_: left.shape[0] * weight.numel(),
    "_euclidean_dist": lambda left, right: left.numel() * right.shape[-2],
    "_cdist_forward": lambda left, right, *_: left.numel() * right.shape[-2],
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_fused_attention_overrideable": _attention,
}
_OWN = {getattr(aten, name): formula for name, formula in _PRODUCTS.items() if hasattr(aten, name)}


def work_of(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Work:
    """What one operation costs."""
    packet = _plain(packet)
    formula = flop_registry.get(packet)
    if formula is not None:
        flops = float(formula(*args, **kwargs, out_val=out))
        return flops, flops / 2
    if packet in _OWN:
        macs = float(_OWN[packet](*args))
        return 2 * macs, macs
    if packet in _WHOLE:
        return _WHOLE[packet](*args)
    if packet in _PASSES:
        passes, weight = _PASSES[packet]
        return (passes + (args[weight] is not None)) * float(_elements(args[:1])), 0.0
    if packet in _FREE:
        return 0.0, 0.0
    if packet in _BY_INPUT:
        return float(_elements(args[:1])), 0.0
    if packet in _BY_OUTPUT or _is_pointwise(packet):
        return float(_elements(out)), 0.0
    return 0.0, 0.0


@functools.cache
def _plain(packet: Any) -> Any:
    """Of an operation in place the one that is not: add_ → add."""
    name = packet.__name__
    if not name.endswith("_") or name.startswith("__"):
        return packet
    return getattr(aten, name[:-1], packet)


@functools.cache
def _is_pointwise(packet: Any) -> bool:
    return any(torch.Tag.pointwise in getattr(packet, name).tags for name in packet.overloads())


def _elements(values: Any) -> int:
    """Of the first tensor of floating point or of complex numbers."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            return leaf.numel()
    return 0


@dataclass(slots=True)
class Record:
    """One module."""

    flops: float = 0.0
    macs: float = 0.0
    duration: float = 0.0
    began: list[float] = field(default_factory=list)
    """One entry for each call that has not ended: a module may call itself."""


class ModuleProfile:
    """Measures a model, module by module, from construction to `close`; what was measured stays."""

    def __init__(self, model: nn.Module, ignore: Collection[type[nn.Module]] = ()) -> None:
        self.model = model
        self._ignore = tuple(ignore)
        self._records: defaultdict[nn.Module, Record] = defaultdict(Record)
        self._running: list[Record] = []
        self._handles: list[Any] = []
        _load_formulas()
        self.open()

    def open(self) -> None:
        """Go on measuring after `close`; what was measured stays."""
        for module in self.model.modules():
            if self._ignore and isinstance(module, self._ignore):
                continue
            self._handles.append(module.register_forward_pre_hook(self._begin, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._end, always_call=True))
        self._counter = Counter(self._add)
        self._counter.begin()

    def close(self) -> None:
        """Stop measuring; closing twice is harmless."""
        if self._handles:
            self._counter.end()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._running.clear()

    def reset(self) -> None:
        """Begin to count from zero."""
        self._records.clear()
        self._running.clear()

    def flops(self, module: nn.Module) -> float:
        """Operations of a module and all inside it."""
        return sum(self._records[inner].flops for inner in module.modules())

    def macs(self, module: nn.Module) -> float:
        """Multiplications with an addition of a module and all inside it."""
        return sum(self._records[inner].macs for inner in module.modules())

    def duration(self, module: nn.Module) -> float:
        """Seconds from begin to end of a module; of one that is only a container, those of what it contains."""
        return self._records[module].duration or sum(map(self.duration, module.children()))

    def _add(self, work: Work) -> None:
        if self._running:
            self._running[-1].flops += work[0]
            self._running[-1].macs += work[1]

    def _begin(self, module: nn.Module, *_: Any) -> None:
        record = self._records[module]
        get_accelerator().synchronize()
        record.began.append(time.perf_counter())
        self._running.append(record)

    def _end(self, module: nn.Module, *_: Any) -> None:
        record = self._records[module]
        if not record.began:
            return
        get_accelerator().synchronize()
        took = time.perf_counter() - record.began.pop()
        if not record.began:  # a call inside a call of the same module is part of it
            record.duration += took
        while self._running and self._running.pop() is not record:
            pass  # modules that ended by an exception


def _load_formulas() -> None:
    """Let torch load what its first formula needs, which takes seconds, before anything is timed."""
    with Counter(lambda _: None):
        torch.mm(torch.ones(1, 1, device="cpu"), torch.ones(1, 1, device="cpu"))


def params_of(module: nn.Module) -> int:
    """Parameters of a module and all inside it, each once; those that are spread over ranks are counted whole."""
    return sum(int(getattr(param, "ds_numel", param.numel())) for param in module.parameters())
