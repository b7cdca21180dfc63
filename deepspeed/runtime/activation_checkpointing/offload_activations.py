"""Hidden states of a model wait in host memory: a context around forward, and marks on the tensors that matter.

    with get_checkpoint_hidden_states_offloading_ctx_manager():
        loss = model(batch).loss
    loss.backward()

Layers of Transformers with gradient checkpointing mark their inputs by themselves; of another model the script calls
`mark` on the input of each checkpointed layer. What is saved without a mark stays where it is.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from deepspeed.errors import UsageError
from deepspeed.memory.lane import on_device
from deepspeed.runtime.activation_checkpointing.chain import Chain, hidden_of
from deepspeed.runtime.activation_checkpointing.layer_marker import MARKER, Layer
from deepspeed.runtime.activation_checkpointing.offload import (
    CheckpointActivationOffloadStats,
    Offload,
    OffloadLimits,
    Parked,
    Turn,
)
from deepspeed.runtime.activation_checkpointing.saved import AsIs, Form, flattened, is_expanded
from deepspeed.runtime.activation_checkpointing.structure import CheckpointingError

__all__ = [
    "CheckpointActivationOffloadStats",
    "CheckpointHiddenStatesOffload",
    "get_checkpoint_hidden_states_offloading_ctx_manager",
    "patch_gradient_checkpointing_layer_marker",
]

_Key = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True)
class _Waiting:
    parked: Parked
    form: Form
    key: _Key


@dataclass(frozen=True, slots=True)
class _Computed:
    """Stands for what a chain of layers computes again."""

    chain: Chain
    position: int


@dataclass(slots=True)
class _Mark:
    storage: StorageWeakRef  # while it is held, no other storage has the same key
    parked: weakref.ref[Parked] | None = None
    version: int = -1
    chain: Chain | None = None
    position: int = 0  # in the chain


class _HiddenStates:
    """What the hooks do; apart from the context, which would hold itself if the hooks were its own methods."""

    def __init__(self, offload: Offload, min_bytes: int) -> None:
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

    def pack(self, tensor: torch.Tensor) -> AsIs | _Waiting | _Computed:
        stats = self.offload.stats
        stats.saved_tensors_seen += 1
        if not self._marks or type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
            return AsIs.of(tensor)
        key = _key(tensor)
        mark = self._marks.get(key)
        if mark is None:
            return AsIs.of(tensor)
        if mark.chain is None:
            return self._keep(tensor, key, mark)
        if mark.position > 0 and mark.chain.first is not None:
            return _Computed(mark.chain, mark.position)
        kept = self._keep(tensor, key, mark)
        mark.chain.first = lambda: self._given_back(kept)
        return kept

    def _keep(self, tensor: torch.Tensor, key: _Key, mark: _Mark) -> AsIs | _Waiting:
        stats = self.offload.stats
        if not on_device(tensor) or tensor.nbytes < self._min_bytes or is_expanded(tensor):
            stats.skipped_marked_tensors += 1
            return AsIs.of(tensor)
        with torch.no_grad():
            flat, form = flattened(tensor)
            parked = None if mark.parked is None or mark.version != tensor._version else mark.parked()
            if parked is None:
                parked = self.offload.park(flat, tensor.shape, Turn())
                mark.parked, mark.version = weakref.ref(parked), tensor._version
        return _Waiting(parked, form, key)

    def unpack(self, kept: AsIs | _Waiting | _Computed) -> torch.Tensor:
        return kept.chain.input_of(kept.position) if isinstance(kept, _Computed) else self._given_back(kept)

    def _given_back(self, kept: AsIs | _Waiting) -> torch.Tensor:
        if isinstance(kept, AsIs):
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
        limits = OffloadLimits(max_fwd_stash_count, max_cpu_buffer_pool_count, keep_last_count)
        self._states = _HiddenStates(Offload(limits, pinned=use_pin_memory, streams=use_streams), min_offload_bytes)
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


def get_checkpoint_hidden_states_offloading_ctx_manager(
    use_pin_memory: bool = True,
    use_streams: bool = True,
    min_offload_bytes: int = 1024,
    max_fwd_stash_count: int = 2,
    max_cpu_buffer_pool_count: int = 64,
    keep_last_count: int = 1,
) -> CheckpointHiddenStatesOffload:
    """The context, with these arguments."""
    return CheckpointHiddenStatesOffload(
        use_pin_memory,
        use_streams,
        min_offload_bytes,
        max_fwd_stash_count,
        max_cpu_buffer_pool_count,
        keep_last_count,
    )


def patch_gradient_checkpointing_layer_marker() -> None:
    """Have layers of Transformers mark their inputs from now on; an open context does it for its own time."""
    MARKER.install()


def _key(tensor: torch.Tensor) -> _Key:
    """What two tensors share that are the same elements of the same memory; autograd hands over another object."""
    storage = tensor.untyped_storage()
    return storage._cdata, int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype
