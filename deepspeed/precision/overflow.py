"""Is there an inf or a NaN in a list of gradients: one answer, which stays on the device until somebody reads it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["has_overflow"]


@torch.no_grad()
def has_overflow(tensors: Iterable[Tensor | None]) -> Tensor:
    """A 0-dim bool tensor, True if any element is inf or NaN; on the first tensor's device, False for an empty list.

    Dtypes, devices and layouts may be mixed; None and integer tensors are passed over. Nothing here waits for the
    device, except for sparse gradients that are not coalesced and for lists that span devices.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for each in tensors:
        if each is not None and (each.is_floating_point() or each.is_complex()):
            dense = _elements(each)
            group = groups.setdefault((dense.device, dense.dtype), [])
            if dense.numel():
                group.append(dense)
    device = next(iter(groups))[0] if groups else torch.device("cpu")
    found = [torch.isfinite(_extremes(group)).all().logical_not() for group in groups.values() if group]
    if not found:
        return torch.zeros((), dtype=torch.bool, device=device)
    return found[0] if len(found) == 1 else torch.stack([each.to(device) for each in found]).any()


def _elements(tensor: Tensor) -> Tensor:
    """The elements to look at, as a dense real tensor."""
    if tensor.layout != torch.strided:
        # Entries of one index add up, in fp16 perhaps to infinity: their sum is the gradient.
        tensor = tensor.coalesce().values() if tensor.layout == torch.sparse_coo else tensor.values()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _extremes(tensors: list[Tensor]) -> Tensor:
    """Values that are all finite exactly if all elements of the tensors, of one device and dtype, are.

    The greatest magnitude of a tensor says so and cannot itself overflow, as a sum or a 2-norm could. On the CPU the
    least and the greatest element are found several times faster than the magnitude.
    """
    if tensors[0].device.type == "cpu":
        return torch.stack([value for each in tensors for value in torch.aminmax(each)])
    return torch.stack(list(torch._foreach_norm(tensors, math.inf)))
