"""Hidden states in host memory: gradients as without, arguments that do what they say.

The only device here is the host, so tensors on it are taken for a device's.
"""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from deepspeed.accelerator import reset_accelerator, set_accelerator
from deepspeed.accelerator.cpu import CPU_Accelerator
from deepspeed.errors import UsageError
from deepspeed.runtime.activation_checkpointing import checkpointing, configuration, offload_activations
from deepspeed.runtime.activation_checkpointing.configuration import (
    ALONE,
    CONFIGURATION,
    CheckpointingSettings,
    InputKeeper,
)
from deepspeed.runtime.activation_checkpointing.offload import CheckpointingError
from deepspeed.runtime.activation_checkpointing.offload_activations import (
    CheckpointActivationOffloadStats,
    CheckpointHiddenStatesOffload,
    get_checkpoint_hidden_states_offloading_ctx_manager,
)

LAYERS = 6
BYTES = 32 * 64 * 4


@pytest.fixture(autouse=True)
def host(monkeypatch):
    set_accelerator(CPU_Accelerator())
    monkeypatch.setattr(offload_activations, "on_device", lambda tensor: True)
    monkeypatch.setattr(configuration, "on_device", lambda tensor: True)
    CONFIGURATION.clear()
    yield
    CONFIGURATION.clear()
    reset_accelerator()


def plain(layer, x):
    return layer(x)


CALLS = {
    "plain": plain,
    "reentrant": partial(torch_checkpoint, use_reentrant=True),
    "non_reentrant": partial(torch_checkpoint, use_reentrant=False),
    "ours": checkpointing.checkpoint,
    "ours_non_reentrant": checkpointing.non_reentrant_checkpoint,
}


class Layer(nn.Module):
    def __init__(self, width=64, inner=8):
        super().__init__()
        self.inner, self.outer = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return x + self.outer(self.inner(x).relu())


def trained(call, offload=None, *, dtype=torch.float32, inside=False, steps=2):
    """Outputs and gradients of a few steps; every layer's input is marked."""
    torch.manual_seed(0)
    layers = [Layer().to(dtype) for _ in range(LAYERS)]
    seen = []
    for _ in range(steps):
        x = torch.randn(32, 64, dtype=dtype, requires_grad=True)
        if offload is None:
            out = forward(layers, call, x)
            out.float().square().mean().backward()
        else:
            with offload:
                out = forward(layers, call, x, offload)
                if inside:
                    out.float().square().mean().backward()
            if not inside:
                out.float().square().mean().backward()
        seen += [out.detach(), x.grad]
        del out
    return seen + [param.grad for layer in layers for param in layer.parameters()]


def forward(layers, call, x, offload=None):
    out = x * 1
    for layer in layers:
        if offload is not None:
            offload.mark(out)
        out = call(layer, out)
    return out


def equal(left, right):
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_gradients_are_those_of_a_plain_run(call, dtype, inside):
    offload = get_checkpoint_hidden_states_offloading_ctx_manager()
    assert equal(trained(plain, dtype=dtype), trained(call, offload, dtype=dtype, inside=inside))
    assert offload.stats.offloaded_tensors == offload.stats.restored_tensors == LAYERS - 1
    assert offload.stats.kept_last_tensors == 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"keep_last_count": 0},
        {"keep_last_count": 4, "max_fwd_stash_count": 0},
        {"max_cpu_buffer_pool_count": 0},
        {"use_pin_memory": False, "use_streams": False},
    ],
)
def test_arguments_change_no_value(arguments):
    offload = CheckpointHiddenStatesOffload(**arguments)
    assert equal(trained(plain), trained(CALLS["non_reentrant"], offload))
    stats, kept = offload.stats, arguments.get("keep_last_count", 1)
    assert (stats.offloaded_tensors, stats.kept_last_tensors) == (LAYERS - kept, kept)
    assert stats.offloaded_bytes == stats.restored_bytes == (LAYERS - kept) * BYTES


def test_what_is_not_marked_or_small_stays():
    offload = CheckpointHiddenStatesOffload(min_offload_bytes=BYTES + 1)
    assert equal(trained(plain), trained(plain, offload, steps=2))
    assert offload.stats.offloaded_tensors == 0
    assert offload.stats.skipped_marked_tensors == LAYERS
    unmarked = CheckpointHiddenStatesOffload(keep_last_count=0)
    x = torch.randn(64, 64, requires_grad=True)
    with unmarked:
        x.sin().sum().backward()
    assert unmarked.stats == CheckpointActivationOffloadStats(saved_tensors_seen=1)


def test_memory_leaves_with_the_mark_and_without_it_stays():
    def alive(marked):
        offload = CheckpointHiddenStatesOffload(keep_last_count=0, max_fwd_stash_count=0)
        x = torch.linspace(-1, 1, 4096, requires_grad=True)
        with offload:
            middle = x * 1
            if marked:
                offload.mark(middle)
            out = middle.sin() * middle.cos()  # saved twice: one copy serves both
        storage = StorageWeakRef(middle.untyped_storage())
        del middle
        held = not storage.expired()
        out.sum().backward()
        return held, offload.stats.offloaded_tensors, x.grad

    there, none, wanted = alive(False)
    gone, one, found = alive(True)
    assert (there, none, gone, one) == (True, 0, False, 1)
    assert torch.equal(wanted, found)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x.view(16, 8, 32).permute(2, 0, 1),
        lambda x: x[:, 3:40],
        lambda x: x.unsqueeze(0),
    ],
)
def test_views_come_back_by_value_and_stride(view):
    seen = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            seen.append(ctx.saved_tensors[0])
            return grad * 2

    offload = CheckpointHiddenStatesOffload(keep_last_count=0, max_fwd_stash_count=0)
    x = torch.randn(64, 64, requires_grad=True)
    tensor = view(x * 1)
    with offload:
        offload.mark(tensor)
        out = Spy.apply(tensor)
    out.sum().backward()
    assert offload.stats.restored_tensors == 1
    assert torch.equal(seen[0], tensor)
    if tensor.is_contiguous() or view(torch.empty(64, 64)).numel() == 64 * 64:
        assert seen[0].stride() == tensor.stride()
    assert seen[0].untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_an_expanded_tensor_and_a_parameter_stay():
    offload = CheckpointHiddenStatesOffload(keep_last_count=0)
    row, weight = torch.randn(1, 64, requires_grad=True), nn.Parameter(torch.randn(64, 64))
    with offload:
        wide = (row * 1).expand(64, 64)
        offload.mark(wide)
        offload.mark(weight)
        (wide.sin() * weight).sum().backward()
    assert offload.stats.offloaded_tensors == 0
    assert (offload.stats.marked_tensors, offload.stats.skipped_marked_tensors) == (2, 1)  # a parameter lives anyway


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("keep", [0, 1])
def test_a_change_in_place_is_noticed(marked, keep):
    offload = CheckpointHiddenStatesOffload(keep_last_count=keep)
    middle = torch.randn(64, 64, requires_grad=True) * 1
    with offload:
        if marked:
            offload.mark(middle)
        out = middle.sin()
    with torch.no_grad():
        middle.add_(1)
    if marked and keep == 0:
        out.sum().backward()  # the copy was made in time
    else:
        with pytest.raises(CheckpointingError, match="changed in place"):
            out.sum().backward()


def test_a_mark_is_for_a_tensor_and_not_for_its_address():
    offload = CheckpointHiddenStatesOffload(keep_last_count=0)
    with offload:
        gone = torch.randn(64, 64)
        offload.mark(gone)
        del gone
        for _ in range(8):  # one of these gets the memory that was freed
            out = (torch.randn(64, 64, requires_grad=True) * 1).sin()
            out.sum().backward()
    assert offload.stats.offloaded_tensors == 0


def test_reset_forgets_numbers_and_buffers_but_nothing_that_waits():
    offload = CheckpointHiddenStatesOffload(keep_last_count=0)
    x = torch.randn(64, 64, requires_grad=True)
    with offload:
        middle = x * 1
        offload.mark(middle)
        out = middle.sin()
        offload.mark(out)
        offload.reset()
        last = out.sin()
    assert offload.stats == CheckpointActivationOffloadStats(saved_tensors_seen=1)
    last.sum().backward()
    assert torch.allclose(x.grad, x.cos() * x.sin().cos())
    assert offload._states.offload.pool.unused == 1
    del last, out
    offload.reset()
    assert offload._states.offload.pool.unused == 0


def test_the_pool_keeps_what_it_may():
    for most in (0, 2, 64):
        offload = CheckpointHiddenStatesOffload(keep_last_count=0, max_cpu_buffer_pool_count=most)
        trained(CALLS["non_reentrant"], offload)
        gc.collect()
        assert offload._states.offload.pool.unused == min(most, LAYERS)


def test_contexts_nest_and_one_is_not_entered_twice():
    outer, inner = CheckpointHiddenStatesOffload(), CheckpointHiddenStatesOffload()
    with outer:
        with pytest.raises(CheckpointingError, match="open already"):
            outer.__enter__()
        with inner:
            tensor = torch.randn(64, 64, requires_grad=True) * 1
            inner.mark(tensor)
            tensor.sin()
    assert (outer.stats.saved_tensors_seen, inner.stats.marked_tensors) == (0, 1)
    with outer:
        pass
    assert isinstance(outer, saved_tensors_hooks)


def test_a_context_is_gone_with_its_last_reference():
    gc.collect()
    gc.disable()
    offload = CheckpointHiddenStatesOffload()
    trained(CALLS["non_reentrant"], offload)
    states = weakref.ref(offload._states)
    del offload
    assert states() is None
    gc.enable()


@pytest.mark.parametrize(
    "name", ["min_offload_bytes", "max_fwd_stash_count", "max_cpu_buffer_pool_count", "keep_last_count"]
)
@pytest.mark.parametrize("value", [-1, True, 1.5, None])
def test_counts_are_checked(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value!r}; expected a whole number from 0 on"):
        CheckpointHiddenStatesOffload(**{name: value})


def test_only_a_tensor_can_be_marked():
    with pytest.raises(UsageError, match="mark got a list"):
        CheckpointHiddenStatesOffload().mark([1])


def test_tensors_in_host_memory_stay(monkeypatch):
    monkeypatch.undo()
    set_accelerator(CPU_Accelerator())
    offload = CheckpointHiddenStatesOffload(keep_last_count=0)
    assert equal(trained(plain), trained(CALLS["non_reentrant"], offload))
    assert (offload.stats.offloaded_tensors, offload.stats.skipped_marked_tensors) == (0, LAYERS)


# ---- activation_checkpointing.cpu_checkpointing: the same mechanism


@pytest.fixture
def to_host(monkeypatch):
    """As on a device, where the settings make the keeper move inputs."""
    made = InputKeeper.__init__

    def init(self, settings, axis):
        made(self, settings, axis)
        self._to_host = settings.cpu_checkpointing

    monkeypatch.setattr(InputKeeper, "__init__", init)


@pytest.mark.usefixtures("to_host")
@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("call", ["ours", "ours_non_reentrant"])
def test_inputs_of_checkpointed_calls_leave_by_the_same_mechanism(call, contiguous):
    wanted = trained(plain)
    checkpointing.configure(
        None,
        checkpoint_in_cpu=True,
        partition_activations=contiguous,
        contiguous_checkpointing=contiguous,
        num_checkpoints=LAYERS,
    )
    assert equal(wanted, trained(CALLS[call]))
    offload = CONFIGURATION.plan.keeper._offload
    assert offload.stats.offloaded_tensors == 2 * (LAYERS - 1)
    gc.collect()
    assert offload.pool.in_use == 0
    assert offload.pool.unused == (0 if contiguous else LAYERS - 1)


@pytest.mark.usefixtures("to_host")
def test_several_inputs_of_one_call_come_together():
    keeper = InputKeeper(CheckpointingSettings(cpu_checkpointing=True), ALONE)
    with keeper.hooks():
        first, second = torch.randn(2, 64, 64, requires_grad=True).unbind()
        out = first * second
    for _ in range(3):
        with keeper.hooks():
            (torch.randn(64, 64, requires_grad=True).sin()).sum().backward()
    (grad,) = torch.autograd.grad(out.sum(), first)
    assert torch.equal(grad, second)
