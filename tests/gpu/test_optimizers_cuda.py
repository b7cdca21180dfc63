"""The optimizers on a real GPU: every implementation against the reference and against the CPU, no waiting, speed."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.accelerator.cuda import CUDA_Accelerator
from deepspeed.ops.adam import AdamRule, DeepSpeedCPUAdam, FusedAdam, adam_reference
from deepspeed.ops.lamb import FusedLamb, LambRule, lamb_reference
from deepspeed.ops.lion import FusedLion, LionRule, lion_reference
from deepspeed.ops.muon import Muon, MuonWithAuxAdam, muon_update
from deepspeed.ops.muon.muon import orthogonalize_reference
from deepspeed.ops.registry import operations

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason=str(CUDA_Accelerator.why_unavailable())),
]

# (param, grad, moments)
DTYPES = [
    (torch.float32, torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16, torch.float32),
]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 5e-6}
SHAPES = [(), (7,), (33, 65), (100_003,), (0,)]


def ways(name):
    able = [each for each in operations()[name].implementations if each.requires.holds and each.name != "reference"]
    return [pytest.param(name, each.name, id=f"{name}-{each.name}") for each in able]


def tensors(dtype, seed, shapes=SHAPES, positive=False):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator).to("cuda", dtype) for shape in shapes]
    return [t.abs() for t in made] if positive else made


RULES = {
    "adam": [
        AdamRule(lr=1e-2, weight_decay=0.1),
        AdamRule(lr=1e-2, weight_decay=0.1, decoupled=False),
        AdamRule(lr=1e-2, weight_decay=0.1, bias_correction=False),
    ],
    "lion": [LionRule(lr=1e-2, weight_decay=0.1)],
    "lamb": [
        LambRule(lr=1e-2, weight_decay=0.1),
        LambRule(lr=1e-2, scale=torch.tensor(2.0, device="cuda")) if torch.cuda.is_available() else LambRule(lr=1e-2),
    ],
}
REFERENCES = {"adam": adam_reference, "lion": lion_reference, "lamb": lamb_reference}


@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(x).removeprefix("torch.") for x in d))
@pytest.mark.parametrize(("op", "way"), ways("adam") + ways("lion") + ways("lamb"))
def test_every_implementation_does_as_the_reference(op, way, dtypes):
    kernel = next(each for each in operations()[op].implementations if each.name == way).load()
    shapes = [shape for shape in SHAPES if op != "lamb" or shape != (0,)]
    for rule in RULES[op]:
        mine = [tensors(dtypes[0], 0, shapes), tensors(dtypes[2], 1, shapes)]
        if op != "lion":
            mine.append(tensors(dtypes[2], 2, shapes, positive=True))
        for step in range(1, 4):
            theirs = [[t.clone() for t in part] for part in mine]
            count = () if op == "lion" else (step,)
            for run, (p, *moments) in ((kernel, mine), (REFERENCES[op], theirs)):
                run(p, tensors(dtypes[1], 10 + step, shapes), *moments, *count, rule)
            for left, right in zip(sum(mine, start=[]), sum(theirs, start=[]), strict=True):  # noqa: RUF017
                bound = TOLERANCE[left.dtype]
                torch.testing.assert_close(left, right, rtol=bound, atol=bound)


def parameters(device="cuda"):
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 32), (64, 32), (64, 32), (16, 128), (48,), ()]
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]


def train(optimizer, params, steps=4):
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 + step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.device)
        optimizer.step()


@pytest.mark.parametrize("cls", [FusedAdam, FusedLion, FusedLamb])
def test_as_on_the_cpu(cls):
    on_gpu, on_cpu = parameters(), parameters("cpu")
    for params in (on_gpu, on_cpu):
        train(cls(params, lr=1e-2, weight_decay=0.1), params)
    for left, right in zip(on_gpu, on_cpu, strict=True):
        torch.testing.assert_close(left.cpu(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adam])
def test_as_torch(cls):
    mine, theirs = parameters(), parameters()
    train(FusedAdam(mine, lr=1e-2, weight_decay=0.1, adam_w_mode=cls is torch.optim.AdamW), mine)
    train(cls(theirs, lr=1e-2, weight_decay=0.1, fused=True), theirs)
    for left, right in zip(mine, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-7)


def test_parameters_on_both_devices():
    mine = [*parameters(), *parameters("cpu")]
    optimizer = FusedAdam(mine)
    train(optimizer, mine)
    with pytest.raises(RuntimeError, match="cuda:0"):
        DeepSpeedCPUAdam(mine).step()


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("shape", [(64, 512), (512, 64), (128, 128), (4, 64, 256)])
def test_orthogonal_in_16_bit(shape, method):
    assert operations()["muon_orthogonalize"].implementations[0].name == "16_bit"
    kernel = operations()["muon_orthogonalize"].chosen[1]
    x = torch.randn(shape, device="cuda")
    exact = orthogonalize_reference(x.double(), 5, method)
    found = kernel(x, 5, method)
    assert found.dtype == torch.float32
    # a relative distance: single elements of a 16-bit product are no better than this
    assert (found - exact).norm() / exact.norm() < (0.01 if method == "gram" else 0.04)


def test_low_rank_stays_bounded_in_float16():
    x = torch.randn(256, 2, device="cuda") @ torch.randn(2, 1024, device="cuda")
    found = operations()["muon_orthogonalize"].chosen[1](x, 5, "gram")
    assert torch.isfinite(found).all()
    assert torch.linalg.matrix_norm(found, 2) < 1.5


def test_alike_matrices_go_together():
    shapes = [(64, 128)] * 5 + [(128, 64)]
    params = [nn.Parameter(torch.zeros(shape, device="cuda")) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    params[3].grad[0, 0] = float("nan")
    alone = [torch.zeros_like(param) for param in params]
    expected = [muon_update(param.grad, momentum) for param, momentum in zip(params, alone, strict=True)]
    optimizer = Muon(params, lr=1.0)
    optimizer.step()
    for param, update, momentum in zip(params, expected, alone, strict=True):
        torch.testing.assert_close(-param.detach(), update, rtol=2e-2, atol=5e-3, equal_nan=True)
        torch.testing.assert_close(optimizer.state[param]["momentum_buffer"], momentum)


def muon_groups():
    params = parameters()
    return [{"params": params[:4], "use_muon": True}, {"params": params[4:], "use_muon": False}], params


@pytest.mark.parametrize("cls", [FusedAdam, FusedLion, FusedLamb, Muon, MuonWithAuxAdam])
def test_a_step_does_not_wait_for_the_device(cls):
    groups, params = muon_groups()
    if cls is Muon:
        params = params[:4]
    optimizer = (
        cls(groups) if cls is MuonWithAuxAdam else cls(params, **({"max_grad_norm": 1.0} if cls is FusedLamb else {}))
    )
    train(optimizer, params, 2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def rate(optimizer, elements, repeats=10):
    """Elements per second of a step, the best of several."""
    best = float("inf")
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.step()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return elements / best


class Operations(TorchDispatchMode):
    """Counts what is asked of torch."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("shapes", [[(50_000_000,)], [(64, 64)] * 400], ids=["one large", "400 small"])
def test_no_more_operations_than_torchs_own(shapes, record_property):
    """Speed goes with them, and is recorded for people to judge."""
    counts = {}
    for name, make in {
        "ours": lambda p: FusedAdam(p),
        "fused": lambda p: torch.optim.AdamW(p, fused=True),
        "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    }.items():
        params = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes]
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer = make(params)
        record_property(name, f"{rate(optimizer, sum(p.numel() for p in params)):.3g} elements/s")
        with Operations() as seen:
            optimizer.step()
        counts[name] = seen.count
    table = 2  # the addresses of all tensors are made and sent
    assert counts["ours"] <= counts["fused"] + table < counts["foreach"], counts
