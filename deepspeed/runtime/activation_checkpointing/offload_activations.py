"""Hidden states of a model wait in host memory: a context around forward, and marks on the tensors that matter.

    with get_checkpoint_hidden_states_offloading_ctx_manager():
        loss = model(batch).loss
    loss.backward()

Layers of Transformers with gradient checkpointing mark their inputs by themselves; of another model the script calls
`mark` on the input of each checkpointed layer. What is saved without a mark stays where it is.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from deepspeed.config.memory import ActivationCheckpointingConfig
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.memory.streaming import CopyStream, copy_stream_for, on_device
from deepspeed.runtime.activation_checkpointing.call import RecomputeContext
from deepspeed.runtime.activation_checkpointing.offload import (
    ActivationOffload,
    CallGroup,
    CheckpointActivationOffloadStats,
    CheckpointingError,
    KeptTensor,
    OffloadedTensor,
    StridedForm,
    flattened,
    is_expanded,
)

_MODULE, _CLASS = "transformers.modeling_layers", "GradientCheckpointingLayer"


Layer = Callable[[torch.Tensor], Any]
"""A layer with all of its arguments but the first."""


def layer_class() -> Any:
    """The class of Transformers' checkpointed layers; None where it is not loaded, so that no model has any."""
    return getattr(sys.modules.get(_MODULE), _CLASS, None)


class LayerMarker:
    """Wraps the call of Transformers' checkpointed layers while marks are wanted, or from `install` on for good."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._wrapper: Any = None
        self._here = threading.local()

    def install(self) -> None:
        """Wrap the layers for as long as the process lives; a second time changes nothing."""
        try:
            from transformers.modeling_layers import GradientCheckpointingLayer  # an optional dependency
        except ImportError as error:
            raise CheckpointingError(
                f"found no transformers with {_CLASS} ({error}), whose layers are to be marked; install "
                "transformers 4.52 or later, or call mark() on the input of every checkpointed layer"
            ) from error
        with self._lock:
            self._users += 1
            self._wrap(GradientCheckpointingLayer)

    def open(self, marks: _HiddenStates) -> None:
        """From now on, layers that this thread calls mark their inputs there."""
        # A model of Transformers can only exist where the module is loaded; nothing else is worth loading it.
        layer = layer_class()
        with self._lock:
            self._users += 1
            if layer is not None:
                self._wrap(layer)
        self._opened.append(marks)

    def close(self) -> None:
        """The one opened last by this thread wants no more marks."""
        self._opened.pop()
        with self._lock:
            self._users -= 1
            layer = layer_class()
            if self._users == 0 and layer is not None and self._wrapper is not None:
                if layer.__call__ is self._wrapper:  # else it was wrapped once more, and ours does nothing
                    layer.__call__ = self._wrapper.__wrapped__
                self._wrapper = None

    @property
    def _opened(self) -> list[_HiddenStates]:
        found: list[_HiddenStates] = self._here.__dict__.setdefault("opened", [])
        return found

    def _wrap(self, layer: Any) -> None:
        if self._wrapper is not None:
            return
        original = layer.__call__

        @functools.wraps(original)
        def marked(module: Any, *args: Any, **kwargs: Any) -> Any:
            saves = bool(self._opened and args and module.gradient_checkpointing and module.training)
            if not saves or not isinstance(args[0], torch.Tensor):
                return original(module, *args, **kwargs)
            marks, others = self._opened[-1], args[1:]  # what runs the layer again must not hold its input
            marks.enter(args[0], lambda hidden: original(module, hidden, *others, **kwargs))
            result = original(module, *args, **kwargs)
            marks.leave(result)
            return result

        layer.__call__ = self._wrapper = marked


MARKER = LayerMarker()


class Chain:
    """Checkpointed layers in a row of which only the first one's input is kept; the others' are computed from it again.

    [Note: chains]
    Backward comes to the last layer of a chain first. Its input is then computed by running the layers before it once
    more, without a graph, and the inputs that appear on the way wait for their layers, whose turn is next. So a chain
    of k layers keeps one input instead of k, holds k - 1 while backward is in it, and costs k - 1 forwards of a layer.
    `first` gives the input of the first layer once it is known.
    """

    def __init__(self) -> None:
        self.first: Callable[[], torch.Tensor] | None = None
        self._runs: list[tuple[Layer, RecomputeContext]] = []
        self._inputs: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, layer: Layer, given: torch.Tensor) -> None:
        """The next layer is about to run with this input."""
        self._runs.append((layer, RecomputeContext([given])))

    def input_of(self, position: int) -> torch.Tensor:
        """The input of a layer but the first; a second time it is computed anew."""
        if position not in self._inputs:
            assert self.first is not None, "the first input is kept before any other is asked for"
            hidden = self.first()
            for before, (layer, conditions) in enumerate(self._runs[:position]):
                with torch.no_grad(), conditions.restored():
                    # as it was then; a reentrant checkpoint warns of an input without
                    hidden = hidden_of(layer(hidden.detach().requires_grad_(hidden.is_floating_point())))
                self._inputs[before + 1] = hidden
        return self._inputs.pop(position)


def hidden_of(result: Any) -> Any:
    """What a layer hands to the next one."""
    return result[0] if isinstance(result, tuple) and result else result


_Key = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True)
class _OffloadedHidden:
    parked: OffloadedTensor
    form: StridedForm
    key: _Key


@dataclass(frozen=True, slots=True)
class _Computed:
    """Stands for what a chain of layers computes again."""

    chain: Chain
    position: int


@dataclass(slots=True)
class _Mark:
    storage: StorageWeakRef  # while it is held, no other storage has the same key
    parked: weakref.ref[OffloadedTensor] | None = None
    version: int = -1
    chain: Chain | None = None
    position: int = 0  # in the chain


class _HiddenStates:
    """What the hooks do; apart from the context, which would hold itself if the hooks were its own methods."""

    def __init__(self, offload: ActivationOffload, min_bytes: int) -> None:
        self.offload = offload
        self.layers = 1  # of a chain, at most
        self._min_bytes = min_bytes
        self._marks: dict[_Key, _Mark] = {}
        self._chain: Chain | None = None
        self._left: tuple[_Key, int, StorageWeakRef] | None = None  # what the last layer returned, and its version

    def mark(self, tensor: torch.Tensor) -> _Mark | None:
        self.offload.stats.marked_tensors += 1
        if type(tensor) is torch.Tensor and tensor.layout == torch.strided:  # others have memory of their own kind
            return self._marks.setdefault(_key(tensor), _Mark(StorageWeakRef(tensor.untyped_storage())))
        return None

    def enter(self, tensor: torch.Tensor, layer: Layer) -> None:
        mark = self.mark(tensor)
        if mark is None or self.layers == 1:
            return
        follows = self._left is not None and self._left[:2] == (_key(tensor), tensor._version)
        if self._chain is None or not follows or len(self._chain) == self.layers:
            self._chain = Chain()
        mark.chain, mark.position = self._chain, len(self._chain)
        self._chain.add(layer, tensor)

    def leave(self, result: Any) -> None:
        hidden = hidden_of(result)
        if type(hidden) is torch.Tensor and hidden.layout == torch.strided:
            self._left = _key(hidden), hidden._version, StorageWeakRef(hidden.untyped_storage())
        else:
            self._left = None

    def forget_marks(self) -> None:
        self._marks.clear()
        self._chain = self._left = None

    def pack(self, tensor: torch.Tensor) -> KeptTensor | _OffloadedHidden | _Computed:
        stats = self.offload.stats
        stats.saved_tensors_seen += 1
        if not self._marks or type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
            return KeptTensor.of(tensor)
        key = _key(tensor)
        mark = self._marks.get(key)
        if mark is None:
            return KeptTensor.of(tensor)
        if mark.chain is None:
            return self._keep(tensor, key, mark)
        if mark.position > 0 and mark.chain.first is not None:
            return _Computed(mark.chain, mark.position)
        kept = self._keep(tensor, key, mark)
        mark.chain.first = lambda: self._given_back(kept)
        return kept

    def _keep(self, tensor: torch.Tensor, key: _Key, mark: _Mark) -> KeptTensor | _OffloadedHidden:
        stats = self.offload.stats
        if not on_device(tensor) or tensor.nbytes < self._min_bytes or is_expanded(tensor):
            stats.skipped_marked_tensors += 1
            return KeptTensor.of(tensor)
        with torch.no_grad():
            flat, form = flattened(tensor)
            parked = None if mark.parked is None or mark.version != tensor._version else mark.parked()
            if parked is None:
                parked = self.offload.park(flat, tensor.shape, CallGroup())
                mark.parked, mark.version = weakref.ref(parked), tensor._version
        return _OffloadedHidden(parked, form, key)

    def unpack(self, kept: KeptTensor | _OffloadedHidden | _Computed) -> torch.Tensor:
        return kept.chain.input_of(kept.position) if isinstance(kept, _Computed) else self._given_back(kept)

    def _given_back(self, kept: KeptTensor | _OffloadedHidden) -> torch.Tensor:
        if isinstance(kept, KeptTensor):
            return kept.get()
        self._marks.pop(kept.key, None)  # a layer that is run again saves its input again, and at once needs it
        with torch.no_grad():
            return kept.form.restore(self.offload.give_back(kept.parked))


class CheckpointHiddenStatesOffload(saved_tensors_hooks):
    """A context in which marked tensors that autograd saves go to the host, and come back before backward needs them.

    Backward may run inside the context or after it.
    """

    def __init__(
        self,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        min_offload_bytes: int = 1024,
        max_fwd_stash_count: int = 2,
        max_cpu_buffer_pool_count: int = 64,
        keep_last_count: int = 1,
    ) -> None:
        """All are counts of tensors or of buffers but `min_offload_bytes`, under which a tensor stays.

        At most `max_fwd_stash_count` tensors are held on the device while they are copied, at most
        `max_cpu_buffer_pool_count` host buffers that no tensor uses are kept for later ones, and the newest
        `keep_last_count` marked tensors do not leave. Without `use_streams` copies run among the computation.
        """
        counts = {
            "min_offload_bytes": min_offload_bytes,
            "max_fwd_stash_count": max_fwd_stash_count,
            "max_cpu_buffer_pool_count": max_cpu_buffer_pool_count,
            "keep_last_count": keep_last_count,
        }
        for name, count in counts.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise UsageError(f"{name} is {count!r}; expected a whole number from 0 on")
        offload = ActivationOffload(
            stash=max_fwd_stash_count,
            pool=max_cpu_buffer_pool_count,
            keep_last=keep_last_count,
            pinned=use_pin_memory,
            copy_stream=copy_stream_for if use_streams else lambda device: CopyStream(),
        )
        self._states = _HiddenStates(offload, min_offload_bytes)
        super().__init__(self._states.pack, self._states.unpack)
        self._open = False

    @property
    def layers_per_checkpoint(self) -> int:
        """Layers of Transformers in a row of which only the first one's input is kept; see [Note: chains]."""
        return self._states.layers

    @layers_per_checkpoint.setter
    def layers_per_checkpoint(self, count: int) -> None:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise UsageError(f"layers_per_checkpoint is {count!r}; expected a whole number above zero")
        self._states.layers = count

    @property
    def stats(self) -> CheckpointActivationOffloadStats:
        """What happened since the context was entered last."""
        return self._states.offload.stats

    def mark(self, tensor: torch.Tensor) -> None:
        """The tensor goes to the host when it is saved in this context, however often that is."""
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"mark got a {type(tensor).__name__}; it takes the tensor that a layer will save")
        self._states.mark(tensor)

    def reset(self) -> None:
        """Wait for copies, forget marks and numbers, and free the host buffers that no tensor uses.

        What waits for backward goes on waiting.
        """
        self._states.forget_marks()
        self._states.offload.drain()
        self._states.offload.stats = CheckpointActivationOffloadStats()

    def __enter__(self) -> CheckpointHiddenStatesOffload:  # type: ignore[override]
        if self._open:
            raise CheckpointingError("this offload of hidden states is open already; make a second one to nest it")
        self._states.offload.stats = CheckpointActivationOffloadStats()
        super().__enter__()
        MARKER.open(self._states)
        self._open = True
        return self

    def __exit__(self, *exc: object) -> None:
        self._open = False
        self._states.forget_marks()
        MARKER.close()
        super().__exit__(*exc)


get_checkpoint_hidden_states_offloading_ctx_manager = CheckpointHiddenStatesOffload


def patch_gradient_checkpointing_layer_marker() -> None:
    """Have layers of Transformers mark their inputs from now on; an open context does it for its own time."""
    MARKER.install()


def _key(tensor: torch.Tensor) -> _Key:
    """What two tensors share that are the same elements of the same memory; autograd hands over another object."""
    storage = tensor.untyped_storage()
    return storage._cdata, int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype


Forward = Callable[..., Any]


def keep_hidden_states(section: ActivationCheckpointingConfig, module: nn.Module, forward: Forward) -> Forward:
    """`forward` in which the inputs of checkpointed layers wait as the section says; itself where it says nothing."""
    count, away = section.layers_per_checkpoint, section.cpu_checkpointing
    kind = layer_class()
    if kind is None or not any(isinstance(each, kind) for each in module.modules()):
        if count > 1:
            raise DeepSpeedConfigError(
                f"activation_checkpointing.layers_per_checkpoint is {count}, but {type(module).__name__} has no layers "
                "of Transformers, whose checkpoints could be put together. Leave it out, and checkpoint several "
                "layers by one call of deepspeed.checkpointing.checkpoint.",
                path="activation_checkpointing.layers_per_checkpoint",
            )
        return forward
    if count == 1 and not away:
        return forward
    nothing_leaves = sys.maxsize
    offload = CheckpointHiddenStatesOffload(
        min_offload_bytes=1024 if away else nothing_leaves, keep_last_count=section.keep_last_count
    )
    offload.layers_per_checkpoint = count

    def call(*args: Any, **kwargs: Any) -> Any:
        with offload:
            return forward(*args, **kwargs)

    return call
