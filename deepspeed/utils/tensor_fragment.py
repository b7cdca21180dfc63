"""The old home of state access: its functions, and DeepSpeed's description of a parameter's part in a flat tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from deepspeed.checkpoint.formats.safe_load import fragment_address
from deepspeed.errors import UsageError
from deepspeed.fragments import intersection
from deepspeed.zero.public.access import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)

__all__ = [
    "fragment_address",
    "get_full_hp_grad",
    "get_full_hp_param",
    "get_hp_fragment_mapping",
    "map_to_flat_opt_states",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_full_hp_grad",
    "set_full_hp_param",
    "tensor_fragment",
]


@dataclass
class tensor_fragment:
    """A parameter's interval (lp) and the interval of a flat master tensor (hp) that belongs to it."""

    lp_fragment: Tensor
    lp_fragment_address: fragment_address
    hp_fragment: Tensor
    hp_fragment_address: fragment_address
    gradient_dict: Mapping[int, Sequence[Tensor]]
    offload_gradient_dict: Mapping[int, Sequence[Tensor]]
    use_offload: bool
    param_group_index: int
    optim_fragment: dict[str, Tensor] | None = None

    def update_hp(self) -> None:
        """The master follows the parameter."""
        self.hp_fragment.data.copy_(self.lp_fragment.data)

    def update_lp(self) -> None:
        """The parameter follows the master."""
        self.lp_fragment.data.copy_(self.hp_fragment.data)

    def get_optim_state_fragment(self, key: str) -> Tensor:
        """The part of an optimizer state."""
        states = self.optim_fragment or {}
        if key not in states:
            raise UsageError(f"there is no optimizer state {key!r} in this fragment; there are {sorted(states)}")
        return states[key]

    def set_optim_state_fragment(self, flat_hp_partition: Tensor, optim_fragment: Mapping[str, Any]) -> None:
        """Cut the states of the flat master tensor."""
        start, numel = self.hp_fragment_address.start, self.hp_fragment_address.numel
        self.optim_fragment = {
            key: value.narrow(0, start, numel)
            for key, value in optim_fragment.items()
            if isinstance(value, Tensor) and value.dim() > 0
        }

    def get_hp_fragment_address(self) -> fragment_address:
        """Where the part lies in the flat master tensor."""
        return self.hp_fragment_address

    def get_optim_state_keys(self) -> list[str]:
        """The optimizer's states."""
        return list(self.optim_fragment or {})

    def get_hp_fragment(self, optim_state_key: str | None = None) -> Tensor:
        """The part of the master, or of an optimizer state."""
        return self.hp_fragment if optim_state_key is None else self.get_optim_state_fragment(optim_state_key)

    def get_lp_grad_fragment(self, index_in_param_group: int) -> Tensor:
        """The part of the gradient."""
        grads = (self.offload_gradient_dict if self.use_offload else self.gradient_dict).get(self.param_group_index)
        if not grads:
            raise UsageError("there is no gradient: gradients are available between backward and step only")
        return grads[index_in_param_group]


def get_hp_fragment_mapping(
    lp_param: Tensor,
    lp_start: int,
    flat_hp_partition: Tensor,
    gradient_dict: Mapping[int, Sequence[Tensor]],
    offload_gradient_dict: Mapping[int, Sequence[Tensor]],
    use_offload: bool,
    param_group_index: int,
    partition_start: int,
    partition_size: int,
) -> tensor_fragment | None:
    """What a flat master tensor, at `partition_start` of all parameters, holds of one that begins at `lp_start`."""
    start, stop = intersection(
        (lp_start, lp_start + lp_param.numel()), (partition_start, partition_start + partition_size)
    )
    if start == stop:
        return None
    lp_address = fragment_address(numel=stop - start, start=start - lp_start)
    hp_address = fragment_address(numel=stop - start, start=start - partition_start)
    return tensor_fragment(
        lp_fragment=lp_param.detach().view(-1).narrow(0, lp_address.start, lp_address.numel),
        lp_fragment_address=lp_address,
        hp_fragment=flat_hp_partition.narrow(0, hp_address.start, hp_address.numel),
        hp_fragment_address=hp_address,
        gradient_dict=gradient_dict,
        offload_gradient_dict=offload_gradient_dict,
        use_offload=use_offload,
        param_group_index=param_group_index,
    )


def map_to_flat_opt_states(
    flat_hp_tensor: Tensor,
    lp_tensors: Sequence[Any],
    optim_state: Mapping[Tensor, dict[str, Tensor]],
    opt_keys: Sequence[str],
) -> None:
    """Join the parts of optimizer states that parameters carry in `_hp_mapping` into flat states, and cut them anew."""
    states = optim_state[flat_hp_tensor]
    mappings = [mapping for mapping in (getattr(p, "_hp_mapping", None) for p in lp_tensors) if mapping is not None]
    for key in opt_keys:
        flat = flat_hp_tensor.new_zeros(flat_hp_tensor.numel())
        for mapping in mappings:
            address, part = mapping.get_hp_fragment_address(), mapping.get_optim_state_fragment(key)
            flat.narrow(0, address.start, address.numel).copy_(part)
        states[key] = flat
    for mapping in mappings:
        mapping.set_optim_state_fragment(flat_hp_tensor, states)


def get_full_hp_param(self: nn.Parameter, optim_state_key: str | None = None) -> Any:
    """The whole master of a parameter, or an optimizer state."""
    if optim_state_key is None:
        return safe_get_full_fp32_param(self)
    return safe_get_full_optimizer_state(self, optim_state_key)


def set_full_hp_param(self: nn.Parameter, value: Tensor, optim_state_key: str | None = None) -> None:
    """Replace the whole master of a parameter, or an optimizer state."""
    if optim_state_key is None:
        safe_set_full_fp32_param(self, value)
    else:
        safe_set_full_optimizer_state(self, value, optim_state_key)


def get_full_hp_grad(self: nn.Parameter) -> Tensor | None:
    """The whole gradient of a parameter."""
    return safe_get_full_grad(self)


def set_full_hp_grad(self: nn.Parameter, value: Tensor) -> None:
    """Replace the whole gradient of a parameter."""
    safe_set_full_grad(self, value)
