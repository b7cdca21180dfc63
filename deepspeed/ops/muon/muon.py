"""Muon: the update of matrices, `Muon` and `SingleDeviceMuon`, where every parameter is one, and fragments of matrices.

[Note: Muon over fragments]
Where an optimizer's parameters are 1-D fragments, momentum is elementwise and stays with them. The direction that it
gives must be made orthogonal as a whole matrix, so every matrix is put together on one of the ranks that hold a part of
it, computed there, and its parts go back: the work is divided over the ranks and nothing is computed twice. A gradient
that is not finite must leave the momentum of the whole matrix alone, also on ranks whose part is finite. They learn it
without another exchange: the rank that sees the whole direction answers with NaN, which an orthogonal matrix never has.

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

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from deepspeed.accelerator import get_accelerator
from deepspeed.ops.capability import Capability, ProbeResult
from deepspeed.ops.moments import Group, moment_width, scale_name, wide
from deepspeed.ops.muon.momentum import Momenta, MomentumRule, advance_, directions_, takes_one_pass
from deepspeed.ops.optimizer import BatchOptimizer, Closure, check_hyperparameters
from deepspeed.ops.registry import implements, op, reference


class SingleDeviceMuon(BatchOptimizer):
    """Momentum whose matrices are made orthogonal, with decoupled weight decay.

    `moment_bits` chooses what holds the momentum: 32, 16 (bfloat16), or 8 (block-wise, a quarter of float32).
    """

    moments: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    whole: WholeMatrices | None = None
    """Set where the parameters are fragments of matrices."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.02,
        weight_decay: float = 0,
        momentum: float = 0.95,
        ns_method: str = "gram",
        *,
        moment_bits: int | None = None,
    ) -> None:
        self.moment_bits = moment_width(type(self).__name__, moment_bits)
        check_hyperparameters(type(self).__name__, lr=lr, weight_decay=weight_decay, momentum=momentum)
        check_ns_method(ns_method)
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "ns_method": ns_method}
        super().__init__(params, defaults)

    def step(self, closure: Closure | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returns."""
        return self._step(closure)

    def _update_group(self, group: Group) -> None:
        update_matrices(self, group, self.whole)

    def takes_one_pass(self, device: torch.device) -> bool:
        return takes_one_pass(device)


class Muon(SingleDeviceMuon):
    """The same on many ranks: each computes every update from the reduced gradients, so no process group is needed."""


def update_matrices(optimizer: BatchOptimizer, group: Group, whole: WholeMatrices | None = None) -> None:
    """Muon's step of one parameter group; the state of a parameter is its `momentum_buffer`.

    Attention projections are cut into heads where the group has `num_heads`, or the parameter `muon_num_heads`. With
    `whole` the parameters are fragments, and all ranks take part.
    """
    momenta = _momenta(optimizer, group)
    rule = MuonRule(beta=group["momentum"], ns_method=group["ns_method"])
    lr = float(group["lr"])
    step = MomentumRule(rule.beta, rule.nesterov, lr, 1 - lr * group["weight_decay"])
    if whole is not None:
        for place, update in fragment_updates(whole, group, momenta, rule):
            advance_(momenta.some([place]), step, [update])
        return
    params = momenta.params
    heads = [heads_of(group, param) for param in params]
    keys = [(param.shape, param.dtype, param.device, heads[place]) for place, param in enumerate(params)]
    for places in alike(keys, params):
        some, first = momenta.some(places), params[places[0]]
        directions = torch.empty(len(places), *first.shape, dtype=wide(first.dtype), device=first.device)
        directions_(some, step, directions.unbind())
        updates = orthogonal_or_nan(directions, rule, num_heads=heads[places[0]])
        advance_(some, step, updates.unbind())


def _momenta(optimizer: BatchOptimizer, group: Group) -> Momenta:
    """What of a group is updated now."""
    found, besides = Momenta([], [], []), optimizer.one_pass
    coded: list[dict[str, Any]] = []
    for param in group["params"]:
        grad = optimizer._gradient(param)
        if grad is None or not param.numel():
            continue
        state = optimizer.state[param]
        if "momentum_buffer" not in state:
            _begin(optimizer, group, param)
        if scale_name("momentum_buffer") in state:
            # one that was loaded from a wider momentum was not counted so far
            state["step"] = state.get("step", 0) + 1
            found.scales.append(state[scale_name("momentum_buffer")])
            found.steps.append(state["step"])
            coded.append(state)
        found.params.append(param)
        found.grads.append(grad)
        found.momenta.append(state["momentum_buffer"])
        found.outs.append(None if besides is None else besides.out(param))
    found.factor = 1.0 if besides is None else besides.factor
    if found.params:
        found.conditions = optimizer._conditions_on(found.params[0].device)
    if found.conditions is not None:
        optimizer.counted = [*optimizer.counted, *coded]
    return found


def _begin(optimizer: BatchOptimizer, group: Group, param: Tensor) -> None:
    """The first state of a parameter; steps are counted where they are needed, for the rounding of codes."""
    state = optimizer.state[param]
    if optimizer.moment_bits == 8:
        optimizer._begin(group, param, state, ("momentum_buffer",))
        return
    state["momentum_buffer"] = torch.zeros_like(param, dtype=optimizer._state_dtype(param), requires_grad=False)


_QUERY = frozenset({"q_proj", "query", "query_proj", "wq", "to_q", "q_b_proj", "kv_b_proj"})
_KEY_VALUE = frozenset({"k_proj", "v_proj", "key", "value", "key_proj", "value_proj", "wk", "wv", "to_k", "to_v"})
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")


def tag_attention_heads(model: nn.Module) -> dict[str, int]:
    """Set `muon_num_heads` on the weight of every query, key and value projection; name → heads of those tagged.

    The numbers come from `model.config` (or its `text_config`), as transformers models have it. A projection whose
    rows do not split into that many heads stays untagged.
    """
    heads = _configured(model, _HEADS)
    key_value_heads = _configured(model, _KEY_VALUE_HEADS) or heads
    tagged: dict[str, int] = {}
    for name, param in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        kind = owner.rpartition(".")[2]
        count = heads if kind in _QUERY else key_value_heads if kind in _KEY_VALUE else None
        shape = tuple(getattr(param, "ds_shape", param.shape))
        if leaf != "weight" or count is None or len(shape) != 2 or shape[0] % count:
            continue
        setattr(param, "muon_num_heads", count)  # noqa: B010  a Parameter has no such attribute of its own
        tagged[name] = count
    return tagged


def _configured(model: nn.Module, names: tuple[str, ...]) -> int | None:
    config: Any = getattr(model, "config", None)
    for source in (getattr(config, "text_config", None), config):
        for name in names:
            value = source.get(name) if isinstance(source, dict) else getattr(source, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


# Elements that one batched product takes.
_STACKED_ELEMENTS = 2**25


@dataclass(frozen=True, slots=True)
class MuonRule:
    """How a momentum becomes an update: its decay and the iteration that makes it orthogonal."""

    beta: float = 0.95
    ns_steps: int = 5
    nesterov: bool = True
    ns_method: str = "gram"


def muon_update(
    grad: Tensor,
    momentum: Tensor,
    beta: float = 0.95,
    ns_steps: int = 5,
    nesterov: bool = True,
    ns_method: str = "gram",
    is_expert_group: bool = False,
    num_heads: int | None = None,
) -> Tensor:
    """Advance `momentum` in place and return the update: orthogonal, scaled by √max(1, rows/columns).

    A gradient of 3 dims is a batch of matrices, one of 4 or more (a convolution) is flattened to the matrix
    [first dim, rest], and with `is_expert_group` to one such matrix per expert. With `num_heads` the rows are cut into
    as many matrices. A gradient that is not finite leaves the momentum alone and is returned as it is.
    """
    rule = MuonRule(beta, ns_steps, nesterov, ns_method)
    return _update(grad[None], momentum[None], rule, is_expert_group=is_expert_group, num_heads=num_heads)[0]


def alike(keys: Sequence[Hashable], tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """The places of tensors with equal keys, as many together as one batch takes."""
    found: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        found.setdefault(key, []).append(place)
    for places in found.values():
        first = tensors[places[0]]
        # A processor gains nothing from a batch, and a batch is a copy.
        together = 1 if first.device.type == "cpu" else max(1, _STACKED_ELEMENTS // max(1, first.numel()))
        for start in range(0, len(places), together):
            yield places[start : start + together]


@torch.no_grad()
def _update(
    grad: Tensor, momentum: Tensor, rule: MuonRule, *, is_expert_group: bool = False, num_heads: int | None = None
) -> Tensor:
    """The update of equal parameters stacked along the first dim."""
    dtype = wide(grad.dtype)
    g, m = grad.to(dtype), momentum.to(dtype)
    finite = torch.isfinite(g).flatten(1).all(1).view(-1, *(1 for _ in grad.shape[1:]))
    m = torch.where(finite, m.lerp(g, 1 - rule.beta), m)
    momentum.copy_(m)
    direction = g.lerp(m, rule.beta) if rule.nesterov else m
    update = orthogonal(direction, rule, is_expert_group=is_expert_group, num_heads=num_heads)
    return torch.where(finite, update, g).to(grad.dtype)


def orthogonal(
    direction: Tensor, rule: MuonRule, *, is_expert_group: bool = False, num_heads: int | None = None
) -> Tensor:
    """The directions of equal parameters, stacked along the first dim, made orthogonal and scaled."""
    matrices = _as_matrices(direction, is_expert_group=is_expert_group, num_heads=num_heads)
    scale = max(1.0, matrices.size(-2) / max(1, matrices.size(-1))) ** 0.5
    # Tall heads come back transposed, which no view could join.
    update: Tensor = (orthogonalize(matrices, rule.ns_steps, rule.ns_method) * scale).reshape(direction.shape)
    return update


def orthogonal_or_nan(directions: Tensor, rule: MuonRule, *, num_heads: int | None) -> Tensor:
    """As `orthogonal`; NaN for a direction that is not finite."""
    finite = torch.isfinite(directions).flatten(1).all(1)
    updates = orthogonal(directions, rule, num_heads=num_heads)
    return updates.masked_fill_(~finite.view(-1, *(1 for _ in directions.shape[1:])), float("nan"))


def _as_matrices(stacked: Tensor, *, is_expert_group: bool, num_heads: int | None) -> Tensor:
    """[count, *parameter] as [..., rows, columns]."""
    check_matrix(stacked.shape[1:], is_expert_group=is_expert_group, num_heads=num_heads)
    if is_expert_group:
        matrices = stacked.flatten(3)
    elif stacked.ndim > 4:
        matrices = stacked.flatten(2)
    else:
        matrices = stacked
    if num_heads is None:
        return matrices
    rows = matrices.size(-2)
    return matrices.reshape(*matrices.shape[:-2], num_heads, rows // num_heads, matrices.size(-1))


def check_matrix(shape: Sequence[int], *, is_expert_group: bool = False, num_heads: int | None = None) -> None:
    """Refuse a parameter that is no matrix, or does not split into its heads."""
    if len(shape) < 2 + is_expert_group:
        kind = "expert parameters of 3 dims (experts first)" if is_expert_group else "parameters of 2 dims"
        raise ValueError(f"Muon updates {kind} or more, found shape {tuple(shape)}; give it to the Adam half")
    rows = shape[1] if is_expert_group or len(shape) == 3 else shape[0]
    if num_heads is not None and (num_heads < 1 or rows % num_heads):
        raise ValueError(
            f"per-head Muon: {rows} rows of a parameter of shape {tuple(shape)} do not split into {num_heads} heads"
        )


def heads_of(group: Mapping[str, Any], param: Tensor) -> int | None:
    """How many heads the rows of a parameter are cut into."""
    heads: int | None = group.get("num_heads") or getattr(param, "muon_num_heads", None)
    return heads


MatrixRule = Callable[[Sequence[int], Sequence[Tensor]], Sequence[Tensor]]
"""(places, whole tensors) → results of the same shapes."""


class WholeMatrices(Protocol):
    """Lends whole tensors to an optimizer whose parameters are fragments of them."""

    def parameter(self, param: Tensor) -> Tensor:
        """The parameter of the model of which the optimizer's `param` is a fragment."""

    def apply(
        self, group: dict[str, Any], params: Sequence[Tensor], fragments: Sequence[Tensor], rule: MatrixRule
    ) -> Iterator[tuple[int, Tensor]]:
        """`rule` of the whole tensors of which `fragments` are parts, as (place, this rank's part of the result).

        `params[place]` is the optimizer's parameter, whose interval of the whole `fragments[place]` covers. Every whole
        tensor is given to `rule` on one rank, which holds a part of it, under the place that it has there. All ranks
        call this for the same group (the optimizer's own dict) at the same time, also those that hold nothing.
        """


def fragment_updates(
    whole: WholeMatrices, group: dict[str, Any], momenta: Momenta, rule: MuonRule
) -> Iterator[tuple[int, Tensor]]:
    """(place, update) of every fragment, in any order, NaN where refused; see [Note: Muon over fragments]."""
    params = momenta.params
    heads = [heads_of(group, whole.parameter(param)) for param in params]
    directions = [torch.empty_like(param, dtype=wide(param.dtype), requires_grad=False) for param in params]
    if params:
        directions_(momenta, MomentumRule(rule.beta, rule.nesterov), directions)

    def compute(places: Sequence[int], wholes: Sequence[Tensor]) -> Sequence[Tensor]:
        return _orthogonal_all(wholes, [heads[place] for place in places], rule)

    yield from whole.apply(group, params, directions, compute)


def _orthogonal_all(wholes: Sequence[Tensor], heads: Sequence[int | None], rule: MuonRule) -> Sequence[Tensor]:
    results: list[Tensor] = list(wholes)
    for places in alike([(whole.shape, whole.dtype, heads[at]) for at, whole in enumerate(wholes)], wholes):
        directions = torch.stack([wholes[place] for place in places])
        updates = orthogonal_or_nan(directions, rule, num_heads=heads[places[0]])
        for place, update in zip(places, updates.unbind(), strict=True):
            results[place] = update
    return results


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
