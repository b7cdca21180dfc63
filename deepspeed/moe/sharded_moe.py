"""A gate, and the layer that takes tokens through it to experts on other ranks and back."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from deepspeed.errors import LayoutError, UsageError
from deepspeed.log import warn_once
from deepspeed.moe.exchange import by_slots, combine, exchange, most_of_all, through_experts, to_rows
from deepspeed.moe.experts import Experts
from deepspeed.moe.routing import (
    Routes,
    capacity_of,
    common_capacity,
    einsum,
    gumbel,
    published,
    random_scores,
    route_top1,
    route_top2,
    route_topk,
    top1_capacity,
    top1gating,
    top2gating,
    topkgating,
)
from deepspeed.moe.stacked_experts import Listener
from deepspeed.ops.grouped import Groups
from deepspeed.ops.model.linear import wide_linear
from deepspeed.parallel import AxisGroup
from deepspeed.parallel.mpu import current_layout
from deepspeed.parallel.regions import between, joined, own

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "MOELayer",
    "TopKGate",
    "drop_tokens",
    "einsum",
    "gather_tokens",
    "top1gating",
    "top2gating",
    "topkgating",
]

M = TypeVar("M", bound=nn.Module)
_JITTER = 0.99, 1.01  # factors of the input of a gate


class TopKGate(nn.Module):
    """Chooses experts for tokens by a linear layer without bias, computed in float32."""

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: ProcessGroup | None = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        """In training "Jitter" varies the gate's input, and "RSample" draws the expert (top-1)."""
        super().__init__()
        if num_experts < 1:
            raise UsageError(f"num_experts is {num_experts}; a gate chooses between 1 or more")
        if not 1 <= k <= num_experts:
            raise UsageError(f"k is {k}; with {num_experts} experts it must be 1 to {num_experts}")
        factors = {"capacity_factor": capacity_factor, "eval_capacity_factor": eval_capacity_factor}
        for name, value in {**factors, "min_capacity": min_capacity}.items():
            if not 0 <= value < math.inf:  # not a number is neither
                raise UsageError(f"{name} is {value}; an expert takes a number of tokens, so it must be 0 or more")
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.ep_group = ep_group
        self.k = k
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.min_capacity = min_capacity
        self.noisy_gate_policy = noisy_gate_policy
        self.drop_tokens = drop_tokens
        self.use_rts = use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling

    def forward(
        self, input: Tensor, used_token: Tensor | None = None, sparse_routes: bool = False, use_tutel: bool = False
    ) -> tuple[Any, ...]:
        """What the gating function of this k returns for these tokens [S, M]."""
        routes = self.route(input, used_token if self.k == 1 else None)
        return published(routes, self.ep_group, sparse=sparse_routes or (use_tutel and self.k == 1))

    def route(self, input: Tensor, used_token: Tensor | None = None) -> Routes:
        """The same choice as `forward`, as routes."""
        if used_token is not None:
            self._check(used_token, len(input))
        logits = self._logits(input)
        shape = (*logits.shape, self._factor * self.k, self.min_capacity)
        if self.k == 1:
            noisy = self.training and self.noisy_gate_policy == "RSample"
            return route_top1(
                logits,
                top1_capacity(*shape) if self.drop_tokens else None,
                used=used_token,
                noise=gumbel if noisy else None,
                lottery=random_scores if self.use_rts else None,
            )
        capacity = capacity_of(*shape) if self.drop_tokens else None
        if self.k == 2:
            return route_top2(logits, capacity, noise=gumbel if self.top2_2nd_expert_sampling else None)
        return route_topk(logits, self.k, capacity)

    def __deepcopy__(self, memo: dict[int, Any]) -> TopKGate:
        return _copy(self, memo, self.ep_group)

    def _check(self, used: Tensor, tokens: int) -> None:
        if self.k > 1:
            warn_once(f"used_token has no effect with k = {self.k}: only a gate with k = 1 leaves tokens out")
        elif used.numel() != tokens:
            raise UsageError(f"used_token has {used.numel()} entries, but there are {tokens} tokens; give one for each")

    @property
    def _factor(self) -> float:
        return self.capacity_factor if self.training else self.eval_capacity_factor

    def _logits(self, input: Tensor) -> Tensor:
        """[S, experts], in float32 whatever the model's dtype and autocast say."""
        with torch.autocast(input.device.type, enabled=False):
            values = input
            if self.training and self.noisy_gate_policy == "Jitter":
                values = input.float()
                low, high = _JITTER
                values = values * (torch.rand(values.shape, device=values.device) * (high - low) + low)
            return wide_linear(values, self.wg.weight)


class MOELayer(nn.Module):
    """Takes tokens to the experts that a gate chooses, on whichever rank they are, and combines what comes back."""

    def __init__(
        self,
        gate: TopKGate,
        experts: nn.Module,
        ep_group_name: str,
        ep_size: int,
        num_local_experts: int,
        use_tutel: bool = False,
    ) -> None:
        """`experts` takes and returns [ranks, local experts, rows, M].

        `use_tutel` changes nothing: tokens are moved by sorting them, as that library does.
        """
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.ep_group_name = ep_group_name
        self.ep_size = ep_size
        self.num_local_experts = num_local_experts
        self.use_tutel = use_tutel
        self.l_aux = torch.zeros(())
        self.exp_counts = torch.zeros(0, dtype=torch.int64)
        self.listener: Listener | None = None
        self._axis: AxisGroup | None = None
        self._slices: AxisGroup | None = None
        self._hosts: ProcessGroup | None = None

    def join(self, axis: AxisGroup, slices: AxisGroup | None = None, hosts: ProcessGroup | None = None) -> None:
        """Send tokens over this axis; the ranks of `slices` have equal tokens, and each sends a part of them.

        Over `hosts`, a group of the ranks of the axis, they tell each other their capacities, which may differ.
        """
        if axis.size != self.ep_size:
            raise LayoutError(f"these experts are spread over {self.ep_size} ranks, but the axis has {axis.size}")
        self._axis = axis
        self._slices = slices if slices is not None and slices.size > 1 else None
        self._hosts = hosts

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no part in the graph of this one's last forward."""
        return self.__dict__ | {"l_aux": self.l_aux.detach()}

    def __deepcopy__(self, memo: dict[int, Any]) -> MOELayer:
        return _copy(self, memo, self._axis, self._slices, self._hosts)

    @property
    def ep_group(self) -> ProcessGroup | None:
        """The ranks over which experts are spread; None before the engine, or a script, says which they are."""
        return None if self._axis is None else self._axis.group

    def forward(self, *input: Tensor, beside: Callable[[], None] | None = None, **kwargs: Any) -> Tensor:
        """Tokens [..., M], and optionally which of them are used [S], through the experts.

        `beside` is done once, while tokens travel.
        """
        tokens = input[0].reshape(-1, input[0].shape[-1])
        routes: Routes = self.gate.route(tokens, *input[1:2])
        self.l_aux, self.exp_counts = routes.loss, routes.counts
        if self.listener is not None and self.training:
            self.listener(routes.counts, routes.kept)
        if self.ep_size > 1 and self._axis is None:
            raise UsageError(
                f"experts are spread over {self.ep_size} ranks, which are not known yet. Hand the model to "
                "deepspeed.initialize, or call set_deepspeed_parallelism() of the MoE layer."
            )
        alone = self.ep_size == 1 and self._slices is None
        if routes.capacity is not None and not (alone and isinstance(self.experts, Experts) and self.experts.as_one):
            combined = self._by_slots(tokens, routes, most_of_all(routes.capacity, self._hosts), beside)
        elif self._slices is not None or not isinstance(self.experts, Experts):
            combined = self._by_slots(tokens, routes, common_capacity(routes, self.ep_group), beside)
        else:
            combined = through_experts(
                tokens,
                routes.experts,
                routes.weights,
                count=routes.num_experts,
                axis=self._axis,
                compute=lambda rows, groups: self.experts(rows, groups=groups),
                beside=beside,
            )
        return combined.view(*input[0].shape[:-1], combined.shape[-1])

    def _by_slots(
        self, tokens: Tensor, routes: Routes, capacity: int, beside: Callable[[], None] | None = None
    ) -> Tensor:
        """Every expert gets as many rows from every rank, so that nobody has to ask how many come."""
        width, ranks, local = tokens.shape[-1], self.ep_size, self.num_local_experts
        if self._slices is not None:
            capacity = -(-capacity // self._slices.size) * self._slices.size
        places = by_slots(routes, capacity)
        rows = to_rows(tokens, places).view(routes.num_experts, capacity, width)
        if self._slices is not None:
            rows = parts_of(rows, 1, self._slices)
        part = rows.shape[1]
        if self._axis is not None:
            rows = exchange(rows, self._axis, beside=beside)
        elif beside is not None:
            beside()
        rows = rows.view(ranks, local, part, width)
        if isinstance(self.experts, Experts):
            by_expert = rows.transpose(0, 1).reshape(-1, width)
            out: Tensor = self.experts(by_expert, groups=Groups(local, length=ranks * part))
            rows = out.view(local, ranks, part, out.shape[-1]).transpose(0, 1)
        else:
            rows = self.experts(rows)
        rows = rows.reshape(ranks * local, part, rows.shape[-1])
        if self._axis is not None:
            rows = exchange(rows, self._axis)
        if self._slices is not None:
            rows = whole_of(rows, 1, self._slices)
        return combine(rows.reshape(-1, rows.shape[-1]), routes.weights, places)


def _copy(module: M, memo: dict[int, Any], *shared: Any) -> M:
    """A deep copy that shares some things with its original, such as groups of processes, which are not copied."""
    memo.update({id(each): each for each in shared})
    made = module.__class__.__new__(module.__class__)
    memo[id(module)] = made
    made.__dict__.update(copy.deepcopy(module.__getstate__(), memo))  # type: ignore[no-untyped-call]
    return made


def drop_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """This tensor-parallel rank's part of a tensor along a dim; gradients come from all of them."""
    axis = _tensor_axis()
    return input_ if axis is None else parts_of(input_, dim, axis)


def gather_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """The parts of all tensor-parallel ranks along a dim; the gradient is this rank's part."""
    axis = _tensor_axis()
    return input_ if axis is None else whole_of(input_, dim, axis)


def parts_of(values: Tensor, dim: int, axis: AxisGroup) -> Tensor:
    """This rank's part along a dim; backward puts the parts of all ranks together."""
    if values.shape[dim] % axis.size:
        raise UsageError(
            f"dim {dim} of a tensor of shape {tuple(values.shape)} cannot be cut into {axis.size} equal parts, one for "
            "each tensor-parallel rank; pad it to a multiple"
        )
    return between(values, axis, [values.shape[dim] // axis.size] * axis.size, dim, (own, joined))


def whole_of(values: Tensor, dim: int, axis: AxisGroup) -> Tensor:
    """The parts of all ranks along a dim; backward takes this rank's part."""
    return between(values, axis, [values.shape[dim]] * axis.size, dim, (joined, own))


def _tensor_axis() -> AxisGroup | None:
    axis = current_layout.get().tensor if current_layout.is_known else None
    return axis if axis is not None and axis.size > 1 else None
