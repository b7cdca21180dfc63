"""Makes matrices nearly orthogonal by a quintic Newton-Schulz iteration: op `muon_orthogonalize`.

[Note: two ways to compute one polynomial]
One step is X ← aX + bRX + cR²X with R = XXᵀ. It pushes every singular value towards 1; five steps leave them within
about 0.7 and 1.2. "standard" computes the steps as written, each with two products of the size of X. "gram" stays in
the small space of R, m × m for X of m × n with m ≤ n: with P = aI + bR + cR² a step is X ← PX, hence R ← PRP, so the
factors P multiply up to a Q and X is touched only once, X ← QX. Rounding errors in the directions that X hardly has
grow by a² ≈ 12 per step in R, so after `_GRAM_STEPS` steps Q is applied and R computed anew from X; in float16
a longer run would drown. "gram" needs 4 products of m·m·n and 14 of m·m·m where "standard" needs 10 and 5, so it
pays off above n = 1.5 m, and below that it takes the standard steps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator
from deepspeed.ops.capability import Capability, ProbeResult
from deepspeed.ops.moments import wide
from deepspeed.ops.registry import implements, op, reference

NS_METHODS = ("gram", "standard")

_A, _B, _C = 3.4445, -4.7750, 2.0315
_GRAM_STEPS = 3
_GRAM_PAYS = 1.5
_TINY = 1e-7


def check_ns_method(method: str) -> str:
    """`method`, if it is one."""
    if method not in NS_METHODS:
        raise ValueError(f"ns_method is {method!r}; it must be one of {', '.join(NS_METHODS)}")
    return method


def ns_compute_dtype(ns_method: str = "gram") -> torch.dtype:
    """The dtype that an accelerator computes the iteration in; processors compute it in float32."""
    return torch.float16 if check_ns_method(ns_method) == "gram" else torch.bfloat16


def orthogonalize(matrices: Tensor, steps: int, ns_method: str) -> Tensor:
    """The nearly orthogonal matrices of a batch [..., rows, columns], in the dtype of the batch."""
    result: Tensor = op("muon_orthogonalize")(matrices, steps, check_ns_method(ns_method))
    return result


def _dtype_on(matrices: Tensor, method: str) -> torch.dtype:
    # Most processors multiply 16-bit matrices a hundred times slower than float32 ones.
    return wide(matrices.dtype) if matrices.device.type == "cpu" else ns_compute_dtype(method)


def _computed(matrices: Tensor, steps: int, dtype: torch.dtype, iterate: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Iterate in `dtype` on matrices of norm 1 that are not taller than wide."""
    if matrices.ndim < 2:
        raise ValueError(f"a matrix has 2 dims or more (the first ones count matrices), found {tuple(matrices.shape)}")
    if not matrices.numel():
        return matrices.clone()
    x = matrices.to(wide(matrices.dtype))
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    # Divided before rounding: large gradients would overflow float16.
    x = (x / (torch.linalg.matrix_norm(x, keepdim=True) + _TINY)).to(dtype)
    x = iterate(x, steps)
    return x.mT if tall else x


def newton_schulz(x: Tensor, steps: int) -> Tensor:
    """The iteration step by step; x is [..., m, n] of norm at most 1."""
    for _ in range(steps):
        gram = x @ x.mT  # [..., m, m]
        x = _A * x + (_B * gram + _C * (gram @ gram)) @ x
    return x


def gram_newton_schulz(x: Tensor, steps: int) -> Tensor:
    """The iteration in the space of the Gram matrix; see [Note: two ways to compute one polynomial]."""
    identity = torch.eye(x.size(-2), dtype=x.dtype, device=x.device)
    while steps > 0:
        run = min(steps, _GRAM_STEPS)
        gram = x @ x.mT
        factor = identity
        for index in range(run):
            step = _A * identity + _B * gram + _C * (gram @ gram)
            factor = step if index == 0 else step @ factor
            if index + 1 < run:
                gram = step @ gram @ step
        x = factor @ x
        steps -= run
    return x


def _cheaper(method: str) -> Callable[[Tensor, int], Tensor]:
    def iterate(x: Tensor, steps: int) -> Tensor:
        gram = method == "gram" and x.size(-1) > _GRAM_PAYS * x.size(-2)
        return gram_newton_schulz(x, steps) if gram else newton_schulz(x, steps)

    return iterate


@reference("muon_orthogonalize")
@torch.no_grad()
def orthogonalize_reference(matrices: Tensor, steps: int, ns_method: str) -> Tensor:
    """The iteration as written, in float32 (float64 for float64), by either method."""
    return _computed(matrices, steps, wide(matrices.dtype), newton_schulz).to(matrices.dtype)


@implements("muon_orthogonalize", name="float32")
@torch.no_grad()
def _orthogonalize_float32(matrices: Tensor, steps: int, ns_method: str) -> Tensor:
    return _computed(matrices, steps, wide(matrices.dtype), _cheaper(ns_method)).to(matrices.dtype)


def _probe() -> ProbeResult:
    name = get_accelerator()._name
    return ProbeResult(name != "cpu", f"the accelerator in use is {name}")


@implements(
    "muon_orthogonalize", name="16_bit", requires=Capability("16-bit matrix units", _probe, lasting=False), rank=20
)
@torch.no_grad()
def _orthogonalize_16_bit(matrices: Tensor, steps: int, ns_method: str) -> Tensor:
    return _computed(matrices, steps, _dtype_on(matrices, ns_method), _cheaper(ns_method)).to(matrices.dtype)
