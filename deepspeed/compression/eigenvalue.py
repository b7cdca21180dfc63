"""`Eigenvalue`: how much the loss bends along the weights of each block, which is the pace at which they lose bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.compression.helper import module_at
from deepspeed.errors import UsageError
from deepspeed.log import log_dist
from deepspeed.parallel import AxisGroup

__all__ = ["BlockCurvature", "Eigenvalue"]

Mean = Callable[[list[Tensor]], list[Tensor]]
"""Makes products of this rank's Hessian those of all ranks'."""


class Eigenvalue:
    """The largest eigenvalue, by magnitude, of the Hessian of a loss over the weights of each block: power iteration.

    `layer_name` is the path of the list of blocks, `layer_num` how many of them count (0: all); an iteration ends after
    `max_iter` products or when an eigenvalue changes by less than a share `tol`. `stability` is added to norms.
    """

    def __init__(
        self,
        verbose: bool = False,
        max_iter: int = 100,
        tol: float = 1e-2,
        stability: float = 0,
        gas_boundary_resolution: int = 1,
        layer_name: str = "",
        layer_num: int = 0,
    ) -> None:
        self.verbose, self.max_iter, self.tol, self.stability = verbose, max_iter, tol, stability
        self.gas_boundary_resolution = gas_boundary_resolution
        self.layer_name, self.layer_num = layer_name, layer_num

    def nan_to_num(self, x: Tensor) -> Tensor:
        """Zeros in place of what is not finite."""
        return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)

    def inner_product(self, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
        """Over all tensors together, in float32."""
        return torch.stack([(x.float() * y.float()).sum() for x, y in zip(xs, ys, strict=True)]).sum()

    def normalize(self, v: Sequence[Tensor]) -> list[Tensor]:
        """Of length 1, with zeros in place of what is not finite."""
        norm = self.inner_product(v, v).sqrt() + self.stability
        return [self.nan_to_num(each / norm.to(each.dtype)) for each in v]

    def get_layers(self, module: nn.Module) -> list[nn.Module]:
        """The blocks, in their order."""
        found = list(module_at(module, self.layer_name, "the model", "eigenvalue.layer_name").children())
        if not found or self.layer_num > len(found):
            raise UsageError(
                f"eigenvalue.layer_num is {self.layer_num}, and the model has {len(found)} blocks at "
                f"{self.layer_name!r}; name a list of blocks, and at most as many as it has, or 0 for all"
            )
        return found[: self.layer_num or None]

    def compute_eigenvalue(
        self, module: nn.Module, device: Any = None, scale: float = 1.0
    ) -> dict[int, tuple[float, int]]:
        """For the id of each parameter of a block: (the eigenvalue by `post_process`, the number of the block).

        The gradients of the parameters are those of `(scale * loss).backward(create_graph=True)`.
        """
        layers = self.get_layers(module)
        trained = [[param for param in layer.parameters() if param.grad is not None] for layer in layers]
        values = self.post_process(
            [
                self.power_iteration([param.grad for param in params], params, scale=scale, seed=number, device=device)
                for number, params in enumerate(trained)
            ]
        )
        return {
            id(param): (values[number], number) for number, layer in enumerate(layers) for param in layer.parameters()
        }

    def power_iteration(
        self,
        grads: Sequence[Tensor | None],
        params: Sequence[Tensor],
        *,
        scale: float = 1.0,
        seed: int = 0,
        device: Any = None,
        mean: Mean = list,
    ) -> float:
        """The eigenvalue over parameters whose gradients hold their graph, `scale` times as large; 0 without any."""
        pairs = [(g, p) for g, p in zip(grads, params, strict=True) if g is not None and g.requires_grad]
        if not pairs:
            return 0.0
        slopes, weights = [g for g, _ in pairs], [p for _, p in pairs]
        random = torch.Generator().manual_seed(seed)
        v = self.normalize([torch.randn(g.shape, generator=random).to(device or g.device, g.dtype) for g in slopes])
        found = 0.0
        for _ in range(self.max_iter):
            product = torch.autograd.grad(slopes, weights, grad_outputs=v, retain_graph=True, allow_unused=True)
            known = [torch.zeros_like(x) if p is None else p for p, x in zip(product, v, strict=True)]
            hv = [self.nan_to_num(each.float() / scale) for each in mean(known)]
            before, found = found, float(self.inner_product(hv, v))
            length = float(self.inner_product(hv, hv))
            if length == 0 or (found != 0 and abs(found - before) < self.tol * abs(found)):
                break
            v = [x.to(g.dtype) for x, g in zip(self.normalize(hv), slopes, strict=True)]
        return found

    def post_process(self, value_list: Sequence[float]) -> list[float]:
        """Magnitudes as shares of the largest; a block without an eigenvalue counts as the largest."""
        top = max((abs(value) for value in value_list), default=0.0)
        return [abs(value) / top if value else 1.0 for value in value_list]


class BlockCurvature:
    """By how much longer the layers of each block keep their bits, from the loss of a training step."""

    def __init__(self, eigenvalue: Eigenvalue, module: nn.Module, axis: AxisGroup) -> None:
        self.eigenvalue, self._axis = eigenvalue, axis
        self.known = False
        """Whether there have been eigenvalues."""
        names = {id(each): name for name, each in module.named_modules()}
        self._blocks = {f"{names[id(layer)]}.": layer for layer in eigenvalue.get_layers(module)}

    @property
    def resolution(self) -> int:
        """Every how many steps it may be computed anew."""
        return self.eigenvalue.gas_boundary_resolution

    def factors(self, loss: Tensor, scale: float, step: int) -> Mapping[str, int]:
        """The factor of the period of each block, 1 + floor(4 * share), by how names in the block begin.

        The loss keeps its graph. All ranks call it together.
        """
        each = [[param for param in layer.parameters() if param.requires_grad] for layer in self._blocks.values()]
        every = [param for params in each for param in params]
        try:
            slopes = dict(
                zip(every, torch.autograd.grad(loss * scale, every, create_graph=True, allow_unused=True), strict=True)
            )
            _require_twice(slopes.values())
            raw = [
                self.eigenvalue.power_iteration(
                    [slopes[param] for param in params],
                    params,
                    scale=scale,
                    seed=step * len(each) + number,
                    mean=self._mean,
                )
                for number, params in enumerate(each)
            ]
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise UsageError(
                "eigenvalue.enabled is true, and the loss cannot be differentiated twice: "
                f"{str(error).splitlines()[0]}. Use attention in plain operations (attn_implementation='eager'), turn "
                "fused kernels and activation checkpointing off, or remove the section"
            ) from error
        self.known, shares = True, self.eigenvalue.post_process(raw)
        if self.eigenvalue.verbose:
            log_dist(f"eigenvalues of {self.eigenvalue.layer_name} after {step} steps: {raw}")
        return {name: 1 + math.floor(4 * share) for name, share in zip(self._blocks, shares, strict=True)}

    def _mean(self, products: list[Tensor]) -> list[Tensor]:
        """Over ranks, which have other samples."""
        if self._axis.size == 1:
            return products
        flat = torch.cat([each.float().flatten() for each in products])
        comm.all_reduce(flat, group=self._axis.group)
        parts = (flat / self._axis.size).split([each.numel() for each in products])
        return [part.view(each.shape) for part, each in zip(parts, products, strict=True)]


def _require_twice(slopes: Iterable[Tensor | None]) -> None:
    """Refuse a graph with functions that can be differentiated once: torch would leave out what goes through them."""
    left: list[Any] = [slope.grad_fn for slope in slopes if slope is not None]
    seen = set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if node.name() == "torch::autograd::Error":
            raise RuntimeError("a function of the model is marked once_differentiable")
        seen.add(node)
        left += [before for before, _ in node.next_functions]
