"""Kernels that are compiled ahead: what is rehearsed is what is launched, launches wait, failures are told."""

from __future__ import annotations

import importlib
import threading
from concurrent.futures import Future
from functools import partial

import pytest
import torch
from torch import nn

from .interpreted import DEVICE, numbers

from deepspeed.fusion.build import KINDS, find, find_feed_forwards8, find_products  # isort: skip
from deepspeed.ops import precompile
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import FusedLion
from deepspeed.ops.precompile import KernelCall, KernelPrecompiler, is_placeholder, kernel_calls_of, launch
from deepspeed.ops.registry import operations
from deepspeed.transformers.replacement import Swap

HOMES = [
    *(f"deepspeed.ops.model.kernels.{name}" for name in ("norm", "gated", "rotary", "cross_entropy")),
    *(f"deepspeed.ops.fp8.kernels.{name}" for name in ("quantise", "groups", "product")),
]


@pytest.fixture
def launched(monkeypatch):
    """The operations of a model run on kernels; the list of what they launch."""
    found = []

    def noted(kernel, grid, *args, **options):
        if not is_placeholder(torch.device("meta")):
            found.append(KernelCall(kernel, args, options))
        launch(kernel, grid, *args, **options)

    for home in HOMES:
        monkeypatch.setattr(importlib.import_module(home), "launch", noted)
    for each in operations().values():
        triton = next((way for way in each._implementations.values() if way.name == "triton"), None)
        if triton is not None:
            monkeypatch.setattr(each, "_chosen", (triton, triton.load()))
    return found


def keys(calls):
    return {call.key for call in calls}


def scenes(findings, dtype):
    found = [each.result.scene for each in findings if isinstance(each.result, Swap)]
    return [partial(scene, dtype=dtype) for scene in found if scene is not None]


def put_in_place(found):
    findings = list(found)
    for each in findings:
        each.result.put()
    return findings


@pytest.mark.parametrize("scaling", [None, "tensor", "row", "block"])
def test_what_is_rehearsed_is_what_a_model_launches(launched, scaling):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=1, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(DEVICE, torch.bfloat16)
    findings = put_in_place(find(model, [kind for kind in KINDS if kind != "inputs"]))
    if scaling is not None:
        findings += put_in_place(find_products(model, scaling, ["lm_head"]))
        joined = put_in_place(find_feed_forwards8(model))
        findings = [each for each in findings if each.kind != "mlp" or not joined] + joined
    findings += put_in_place(find(model, ["inputs"]))
    tokens = torch.randint(128, (2, 16), device=DEVICE)
    model(input_ids=tokens, labels=tokens).loss.backward()
    rehearsed = [call for scene in scenes(findings, torch.bfloat16) for call in kernel_calls_of(scene)]
    assert keys(launched), "the model runs on kernels"
    missing = {call.kernel for call in launched if call.key not in keys(rehearsed)}
    assert not missing, f"launched and not rehearsed: {missing}"
    assert keys(rehearsed) == keys(launched), "nothing is compiled in vain"


def test_norms_and_gelu_of_plain_modules(launched):
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)).to(DEVICE)
    findings = list(find(model, KINDS))
    for each in findings:
        each.result.put()
    model(numbers(16, 32)).sum().backward()
    rehearsed = [call for scene in scenes(findings, torch.float32) for call in kernel_calls_of(scene)]
    assert keys(launched) == keys(rehearsed)


def test_equal_scenes_are_played_once():
    played = []

    def scene(number, *shapes, dtype, norm=None):
        played.append((number, shapes, dtype))

    def inner(eps):
        return partial(max, eps)

    scenes = [
        partial(partial(scene, number % 2, (4, 8)), dtype=dtype, norm=inner(1e-6))
        for number in range(6)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    scenes += [partial(scene, 0, (4, 8), dtype=torch.float32, norm=inner(1e-5))]
    scenes += [partial(scene, [1], dtype=None), partial(scene, [1], dtype=None)]  # lists have no hash
    KernelPrecompiler(torch.device("cpu"))._noted(scenes)
    assert len(played) == 4 + 1 + 2


def test_a_rehearsal_launches_nothing_and_ends():
    class Kernel:
        def __getitem__(self, grid):
            raise AssertionError("launched in a rehearsal")

    (call,) = kernel_calls_of(lambda: launch(Kernel(), (1,), 3, BLOCK=4))
    assert (call.args, call.options) == ((3,), {"BLOCK": 4})
    assert not is_placeholder(torch.device("meta")), "the rehearsal is over"
    with pytest.raises(ValueError, match="scene"):
        kernel_calls_of(partial(_fail, "scene"))
    assert not is_placeholder(torch.device("meta")), "also of a scene that failed"


def _fail(text):
    raise ValueError(text)


class Slow:
    """A kernel that takes until it is told to be compiled."""

    def __init__(self, error=None):
        self.order, self.go, self.error = [], threading.Event(), error

    def warmup(self, *args, grid, **options):
        assert self.go.wait(60), "nobody let it go on"
        self.order.append("compiled")
        if self.error is not None:
            raise self.error

    def __getitem__(self, grid):
        return lambda *args, **options: self.order.append("launched")


@pytest.fixture
def threads(monkeypatch):
    loaded = Future()
    loaded.set_result(None)
    monkeypatch.setattr(precompile, "load_triton", lambda: loaded)
    made = KernelPrecompiler(torch.device("cpu"))
    yield made
    made.close()


def test_a_launch_waits_for_its_kernel_and_for_no_other(threads):
    slow, other = Slow(), Slow()
    other.go.set()
    threads.add([lambda: launch(slow, (1,), 1), lambda: launch(other, (1,), 1)])
    launch(other, (1,), 1)
    assert other.order == ["compiled", "launched"], "it waited for its own, while the other is compiled"
    threading.Timer(0.05, slow.go.set).start()
    launch(slow, (1,), 1)
    assert slow.order == ["compiled", "launched"]
    assert not precompile.PENDING.open, "nothing is waited for any more"


def test_a_launch_waits_for_its_own_constants_unless_nobody_foresaw_it():
    kernel = object()
    small, large, unforeseen = (KernelCall(kernel, (1,), {"BLOCK": block}) for block in (1, 2, 4))
    board = precompile._Pending()
    done, under_way = Future(), Future()
    done.set_result(None)
    board.put(done, small)
    board.put(under_way, large)
    board.wait_for(small)
    threading.Timer(0.05, under_way.set_result, [None]).start()
    board.wait_for(unforeseen)
    assert under_way.done(), "one that nobody foresaw may be the same as any"
    assert not board.open


@pytest.mark.parametrize("where", ["scene", "compiler"])
def test_what_fails_in_a_thread_is_told_and_left_to_its_first_use(threads, where, monkeypatch):
    told = []
    monkeypatch.setattr(precompile.logger, "warning", lambda text, *given: told.append(text % given))
    broken = Slow(RuntimeError("no such register"))
    broken.go.set()
    threads.add([partial(_fail, "no such register") if where == "scene" else lambda: launch(broken, (1,), 1)])
    launch(broken, (1,), 1)
    assert broken.order[-1] == "launched"
    assert len(told) == 1, f"told {told}"
    assert "no such register" in told[0]


def test_a_closed_rehearsal_keeps_nobody_waiting(threads):
    slow = Slow()
    threads.add([lambda: launch(slow, (1,), 1)])
    threads.close()
    slow.go.set()
    launch(slow, (1,), 1)
    assert slow.order[-1] == "launched"


def test_first_launches_of_all_scenes_come_before_the_others(threads):
    kernels = [object() for _ in range(4)]
    scenes = [
        lambda: [launch(kernels[at], (1,), 1) for at in (0, 2)],
        lambda: [launch(kernels[at], (1,), 1) for at in (1, 0, 3)],
    ]
    assert [call.kernel for call in threads._noted(scenes)] == [kernels[at] for at in (0, 1, 2, 3)]


def test_where_triton_compiles_nothing_there_is_no_rehearsal(monkeypatch):
    assert KernelPrecompiler.on(torch.device("cpu")) is None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert KernelPrecompiler.on(torch.device("cuda")) is None


@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("make", [FusedAdam, FusedLion, FusedLamb])
def test_the_step_of_an_optimizer_is_rehearsed_as_it_is_taken(make, bits, monkeypatch):
    """The same call for masters of float32 with gradients and weights of bfloat16, in memory and without."""
    from deepspeed.ops.kernels import many
    from deepspeed.ops.one_pass import Conditions, OnePass
    from deepspeed.runtime.step import stepper

    found = []

    def noted(kernel, grid, *args, **options):
        found.append(KernelCall(kernel, args, options))
        launch(kernel, grid, *args, **options)

    monkeypatch.setattr(many, "launch_kernel", noted)
    for each in operations().values():
        triton = next((way for way in each._implementations.values() if way.name == "triton"), None)
        if triton is not None and each.name.endswith("one_pass"):
            monkeypatch.setattr(each, "_chosen", (triton, triton.load()))
    master = nn.Parameter(numbers(64))
    monkeypatch.setattr(make, "takes_one_pass", lambda self, device: True)
    optimizer = make([master], moment_bits=bits, **({"max_grad_norm": 0.0} if make is FusedLamb else {}))

    class Like:
        pass

    piece = Like()
    piece.master, piece.param, piece.source, piece.separate = master, master, master.bfloat16(), True
    rehearsed = kernel_calls_of(lambda: stepper._compile_step(optimizer, 0, piece, torch.bfloat16))
    assert not optimizer.state, "the optimizer itself has not stepped"
    found.clear()
    grads, outs = {master: numbers(64, dtype=torch.bfloat16)}, {master: numbers(64, dtype=torch.bfloat16)}
    optimizer.one_pass = OnePass(1.0, grads, outs)
    with optimizer.under(Conditions(torch.ones(()), torch.zeros(()))):
        optimizer.step()
    assert rehearsed, "a kernel updates"
    assert keys(rehearsed) == keys(found)
