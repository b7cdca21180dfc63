"""Checkpointed calls on one process: the same numbers as without, whatever goes in and comes out."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from deepspeed.accelerator import get_accelerator, reset_accelerator, set_accelerator
from deepspeed.accelerator.cpu import CPU_Accelerator
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.runtime import rng
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.activation_checkpointing.configuration import CONFIGURATION

VARIANTS = {"reentrant": checkpointing.checkpoint, "non_reentrant": checkpointing.non_reentrant_checkpoint}
KEPT = {
    "plain": {},
    "cpu": {"checkpoint_in_cpu": True},
    "contiguous": {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 8},
}


@pytest.fixture(autouse=True)
def fresh():
    CONFIGURATION.clear()
    rng.get_cuda_rng_tracker().reset()
    set_accelerator(CPU_Accelerator())
    with torch.random.fork_rng(devices=[]):
        yield
    reset_accelerator()
    CONFIGURATION.clear()
    rng.get_cuda_rng_tracker().reset()


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS)
def checkpoint(request):
    return request.param


@pytest.fixture(params=KEPT.values(), ids=KEPT)
def kept(request):
    checkpointing.configure(None, **request.param)


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def plainly(function, *args, **kwargs):
    return function(*args, **kwargs)


class Block(nn.Module):
    """A layer with dropout from both generators: the device's and the model-parallel one."""

    def __init__(self, width=64, inner=8):
        super().__init__()
        self.inner, self.outer = nn.Linear(width, inner), nn.Linear(inner, width)
        self.calls = 0

    def forward(self, x, scale=1.0):
        self.calls += 1
        with checkpointing.get_cuda_rng_tracker().fork():
            inner = F.dropout(self.inner(x).relu(), 0.3)
        return x + F.dropout(self.outer(inner), 0.3) * scale


def trained(run, *, dtype=torch.float32, steps=2, autocast=False):
    """(outputs, gradients, draws left over) of a few steps over four blocks."""
    torch.manual_seed(0)
    blocks = [Block().to(dtype) for _ in range(4)]
    checkpointing.model_parallel_cuda_manual_seed(1)
    seen = []
    for _ in range(steps):
        x = torch.randn(32, 64, dtype=dtype, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = x * 1
            for block in blocks:
                out = run(block, out, scale=0.5)
        out.float().square().mean().backward()
        seen += [out.detach(), x.grad]
    with checkpointing.get_cuda_rng_tracker().fork():
        seen.append(torch.rand(3))
    seen.append(torch.rand(3))
    return seen + [p.grad for block in blocks for p in block.parameters()], blocks


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
)
@pytest.mark.usefixtures("kept")
def test_bit_equal_to_the_plain_model(checkpoint, dtype, autocast):
    wanted, _ = trained(plainly, dtype=dtype, autocast=autocast)
    found, blocks = trained(checkpoint, dtype=dtype, autocast=autocast)
    assert all(torch.equal(left, right) for left, right in zip(wanted, found, strict=True))
    assert [block.calls for block in blocks] == [4] * 4  # two steps, each forward and recompute


@pytest.mark.usefixtures("kept")
def test_structures_keywords_and_other_objects(checkpoint):
    def function(pair, options, *, named, flag, nothing):
        assert flag is True
        assert nothing is None
        return {"sum": pair[0] + named["w"], "list": [pair[1] * 2, None, "text"]}, options["ids"] + 1, 7

    def inputs():
        torch.manual_seed(4)
        left, right, w = (torch.randn(40, 40, requires_grad=True) for _ in range(3))
        return left, right, w, torch.arange(3)

    def loss_of(run, left, right, w, ids):
        out, ids, number = run(function, (left, right), {"ids": ids}, named={"w": w}, flag=True, nothing=None)
        assert out["list"][1:] == [None, "text"]
        assert ids.tolist() == [1, 2, 3]
        assert number == 7
        return (out["sum"] * out["list"][0]).sum()

    plain, checkpointed = inputs(), inputs()
    loss_of(plainly, *plain).backward()
    loss_of(checkpoint, *checkpointed).backward()
    for left, right in zip(plain[:3], checkpointed[:3], strict=True):
        assert torch.equal(left.grad, right.grad)


@pytest.mark.parametrize("made", [lambda x: None, lambda x: 3, lambda x: (), lambda x: [x.detach() * 2]])
def test_results_without_a_gradient(checkpoint, made):
    x = torch.ones(2, requires_grad=True)
    result = checkpoint(made, x)
    wanted = made(x)
    assert type(result) is type(wanted)
    if isinstance(wanted, list):
        assert torch.equal(result[0], wanted[0])
    else:
        assert result == wanted


@pytest.mark.usefixtures("kept")
def test_nested(checkpoint):
    blocks = [Block(), Block()]
    checkpointing.model_parallel_cuda_manual_seed(1)

    def both(run, x):
        return run(blocks[1], run(blocks[0], x))

    def gradients(outer, inner):
        torch.manual_seed(2)
        checkpointing.model_parallel_cuda_manual_seed(1)
        x = torch.randn(32, 64, requires_grad=True)
        outer(both, inner, x).sum().backward()
        found = [x.grad] + [p.grad for block in blocks for p in block.parameters()]
        for block in blocks:
            block.zero_grad()
        return found

    wanted = gradients(plainly, plainly)
    assert all(map(torch.equal, gradients(checkpoint, checkpoint), wanted))


@pytest.mark.usefixtures("kept")
def test_one_module_used_twice(checkpoint):
    layer = nn.Linear(64, 64)
    x = torch.randn(32, 64, requires_grad=True)
    layer(layer(x)).sum().backward()
    wanted = layer.weight.grad.clone(), x.grad.clone()
    layer.zero_grad()
    x.grad = None
    checkpoint(layer, checkpoint(layer, x)).sum().backward()
    assert torch.equal(layer.weight.grad, wanted[0])
    assert torch.equal(x.grad, wanted[1])


def test_the_same_tensor_twice(checkpoint):
    x = torch.randn(32, 64, requires_grad=True)
    checkpoint(lambda a, b: a * b, x, x).sum().backward()
    assert torch.equal(x.grad, 2 * x)


def test_no_grad_just_runs(checkpoint):
    calls = []

    def function(x):
        calls.append(torch.is_grad_enabled())
        return x * 2

    checkpointing.configure(None, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=1)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = [checkpoint(function, torch.ones(2000)) for _ in range(3)]
    assert calls == [False] * 3
    assert not kept[0].requires_grad


def test_no_input_that_requires_grad_warns_as_torch_does():
    layer = nn.Linear(4, 4)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        out = checkpointing.checkpoint(layer, torch.ones(2, 4))
    assert not out.requires_grad
    out = checkpointing.non_reentrant_checkpoint(layer, torch.ones(2, 4))
    out.sum().backward()
    assert layer.weight.grad is not None


def test_torchs_own_keywords():
    layer = nn.Linear(4, 4)
    checkpointing.checkpoint(layer, torch.ones(2, 4), use_reentrant=False).sum().backward()
    assert layer.weight.grad is not None
    torch.manual_seed(0)
    seen = []
    x = torch.ones(2, requires_grad=True)

    def draw(x):
        seen.append(torch.rand(1).item())
        return x * 1

    checkpointing.checkpoint(draw, x, preserve_rng_state=False).sum().backward()
    assert seen[0] != seen[1]


@pytest.mark.usefixtures("kept")
def test_autograd_grad_twice_over_one_graph():
    x = torch.randn(40, 40, requires_grad=True)
    out = checkpointing.non_reentrant_checkpoint(lambda a: a.tanh() * a, x).sum()
    first = torch.autograd.grad(out, x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(out, x)[0], first)


@pytest.mark.usefixtures("kept")
def test_a_retained_graph(checkpoint):
    x = torch.randn(40, 40, requires_grad=True)
    out = checkpoint(lambda a: a.tanh() * a, x).sum()
    out.backward(retain_graph=True)
    once = x.grad.clone()
    out.backward()
    assert torch.equal(x.grad, 2 * once)


def test_a_body_that_computes_gradients_itself(checkpoint):
    """What it saves is not kept by our hooks: the only slot stays for the call's own input."""
    checkpointing.configure(None, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=1)

    def slope(x):
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            return x * torch.autograd.grad((y.tanh() * y.exp()).sum(), y)[0]

    x = torch.randn(40, 40, requires_grad=True)
    checkpoint(slope, x).sum().backward()
    found, x.grad = x.grad, None
    slope(x).sum().backward()
    assert torch.equal(found, x.grad)


def test_an_error_in_the_body_leaves_nothing_behind(checkpoint):
    checkpointing.configure(None, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=1)
    x = torch.randn(40, 40, requires_grad=True)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            checkpoint(lambda a: a * (1 / 0), x)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        (x * x).sum()
    assert saved, "our hooks are off the stack"
    checkpoint(lambda a: a * a, x).sum().backward()


@pytest.mark.usefixtures("no_collector")
def test_contiguous_inputs_share_one_buffer_that_every_step_uses_again(checkpoint):
    checkpointing.configure(None, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=3)
    layers = [nn.Linear(64, 64) for _ in range(3)]
    arena = CONFIGURATION.plan.keeper.arena
    for rows in (32, 32, 16):
        out = torch.randn(rows, 64, requires_grad=True) * 1
        for layer in layers:
            out = checkpoint(layer, out)
        out.sum().backward()
        assert arena.buffer_elements == 3 * 32 * 64


def test_more_calls_than_the_buffer_has_room_for(checkpoint):
    checkpointing.configure(None, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=2)
    out = torch.randn(32, 64, requires_grad=True)
    with pytest.raises(DeepSpeedConfigError, match="2 checkpointed calls are kept already") as caught:
        for _ in range(3):
            out = checkpoint(nn.Linear(64, 64), out)
    assert caught.value.path == "activation_checkpointing.number_checkpoints"


def test_configuring_between_forward_and_backward(checkpoint):
    checkpointing.configure(None, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=2)
    x = torch.randn(40, 40, requires_grad=True)
    out = checkpoint(lambda a: a * a, x)
    checkpointing.reset()
    checkpointing.configure(None)
    out.sum().backward()
    assert torch.equal(x.grad, 2 * x)


@pytest.mark.usefixtures("no_collector")
def test_the_activations_of_the_body_are_not_kept(checkpoint):
    inner = []

    def function(x):
        hidden = x.exp()
        inner.append(weakref.ref(hidden))
        return hidden.sin().sum()

    x = torch.randn(40, 40, requires_grad=True)
    loss = checkpoint(function, x)
    assert inner[0]() is None
    loss.backward()
    assert torch.equal(x.grad, x.exp().cos() * x.exp())


@pytest.mark.usefixtures("no_collector", "kept")
def test_everything_goes_at_once_after_backward(checkpoint):
    """Not when the garbage collector comes along: that would be steps later."""
    checkpoint(torch.sin, torch.ones(1, requires_grad=True)).sum().backward()  # what torch loads on first use
    x = torch.randn(40, 40, requires_grad=True)
    middle = x * 1
    result = weakref.ref(middle.untyped_storage())
    loss = checkpoint(lambda pair, *, scale: [pair[0].sin() * scale], (middle, 1), scale=2.0)[0].sum()
    del middle
    loss.backward()
    del loss
    assert result() is None
    assert torch.equal(x.grad, x.cos() * 2)


def test_boundaries_are_synchronised(checkpoint, monkeypatch):
    calls = []
    monkeypatch.setattr(type(get_accelerator()), "synchronize", lambda self, index=None: calls.append("sync"))
    checkpointing.configure(None, synchronize=True)
    x = torch.ones(2, requires_grad=True)
    checkpoint(lambda a: calls.append("run") or a.sin(), x).sum().backward()
    assert calls == ["sync", "run", "sync"] * 2


def test_profile_tells_the_time_of_each_call(checkpoint, capsys):
    checkpointing.configure(None, profile=True)
    x = torch.ones(2, requires_grad=True)
    loss = checkpoint(torch.sin, x).sum()
    assert "checkpoint forward: " in capsys.readouterr().out
    loss.backward()
    assert "checkpoint recompute: " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("run", VARIANTS.values(), ids=VARIANTS)
def test_the_compiler_sees_one_graph(run):
    layer = nn.Linear(8, 8)

    def function(x, scale):
        return layer(x).relu() * scale

    def model(x):
        return run(function, x, scale=2.0).sum()

    x = torch.randn(4, 8, requires_grad=True)
    torch._dynamo.reset()
    torch.compile(model, backend="aot_eager", fullgraph=True)(x).backward()
    found, x.grad = x.grad, None
    function(x, 2.0).sum().backward()
    assert torch.allclose(found, x.grad)
