"""What an optimizer keeps per parameter: its moments, what holds them and where, and how they come back.

Moments are held in a dtype, or in 8 bits: then `exp_avg` is a tensor of codes and `exp_avg_scale` beside it has their
scales (`blockwise`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepspeed.errors import UsageError
from deepspeed.ops import blockwise

Group = dict[str, Any]
StateEntry = tuple[str, torch.dtype, int]
"""A state tensor of a parameter: name, dtype, number of elements."""

# What `moment_bits` may be, and what holds such a moment.
_HELD_IN = {32: torch.float32, 16: torch.bfloat16, 8: torch.uint8}

_SCALE = "_scale"


def scale_name(moment: str) -> str:
    """The state that has the scales of a moment in 8 bits."""
    return moment + _SCALE


def moment_width(name: str, bits: int | None) -> int | None:
    """`bits`, if moments can be held in so many."""
    if bits is not None and (isinstance(bits, bool) or bits not in list(_HELD_IN)):
        raise ValueError(
            f"{name}: moment_bits is {bits!r}; it must be 8 (block-wise), 16 (bfloat16), 32 (float32) or None, which "
            "leaves it to fp32_optimizer_states"
        )
    return bits


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a rule computes in: float32, or float64 for a float64 parameter."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class MomentKeeper(torch.optim.Optimizer):
    """An optimizer that names its moments and decides what holds them."""

    moments: ClassVar[tuple[str, ...]] = ()
    """State tensors of a parameter, shaped like it; beside them the state holds the int `step`."""

    positive: ClassVar[frozenset[str]] = frozenset({"exp_avg_sq"})
    """The moments that are never negative."""

    settings: ClassVar[tuple[str, ...]] = ()
    """Attributes that a copied or unpickled optimizer keeps; torch keeps only groups and state."""

    fp32_optimizer_states: bool = False

    state_dtype: torch.dtype | None = None
    """What every moment is held in; None leaves it to `fp32_optimizer_states` and the dtype of the parameter."""

    moment_bits: int | None = None
    """8, 16 or 32 bits of a moment, before anything else decides; None leaves it to `state_dtype`."""

    new_state: Callable[[Tensor, torch.dtype, str], Tensor] | None = None
    """Gives a parameter's new state tensor, by dtype and name in `state_layout`: zeros in memory of the caller's."""

    def state_layout(self, param: Tensor) -> list[StateEntry]:
        """Each state tensor that `param` has or will have."""
        return self._layout(param, self.moments)

    def moment(self, param: Tensor, name: str) -> Tensor:
        """A moment in the shape of its parameter: the tensor itself, or the values that its codes stand for."""
        state = self.state[param]
        if scale_name(name) not in state:
            held: Tensor = state[name]
            return held
        return self._decoded(param, name, state[name], state[scale_name(name)])

    @torch.no_grad()
    def set_moment(self, param: Tensor, name: str, value: Tensor) -> None:
        """Write values, as many as the parameter has, into a moment that is there; rounded to nearest."""
        state = self.state[param]
        if scale_name(name) in state:
            values = value.to(param.device, torch.float32)
            blockwise.encode(values, state[name], state[scale_name(name)], signed=self._signed(name))
        else:
            state[name].copy_(value.view(param.shape))

    def hold_states(self, dtype: torch.dtype) -> bool:
        """Hold the moments in `dtype`, those too that are there already; False if some are made by somebody else.

        What `moment_bits` asks for stays.
        """
        self.state_dtype = dtype
        if self.moment_bits is not None:
            return True
        for state in self.state.values():
            for name in self.moments:
                if name in state:
                    state[name] = state[name].to(dtype)
        return True

    @torch.no_grad()
    def take_part(self, param: Tensor, whole: Tensor, interval: tuple[int, int]) -> None:
        """Give `param`, which stands for an interval of the elements of `whole`, its part of what is kept of that."""
        start, stop = interval
        state = self.state[whole]
        coded = {scale_name(name) for name in self.moments}
        part = {
            name: self.moment(whole, name).reshape(-1)[start:stop].clone().view(param.shape)
            if name in self.moments
            else value
            for name, value in state.items()
            if name not in coded
        }
        self.state[param] = self._restored_state(param, part)

    def _begin(self, group: Group, param: Tensor, state: dict[str, Any], names: Sequence[str]) -> None:
        # Checkpoints of long ago count steps per group.
        state["step"] = int(group.get("step", 0))
        for entry in self._layout(param, names):
            state[entry[0]] = self._memory(param, entry)

    def _layout(self, param: Tensor, names: Sequence[str]) -> list[StateEntry]:
        dtype, numel = self._state_dtype(param), param.numel()
        if dtype != torch.uint8:
            return [(name, dtype, numel) for name in names]
        scales = blockwise.blocks(numel)
        return [each for name in names for each in ((name, dtype, numel), (scale_name(name), torch.float32, scales))]

    def _memory(self, param: Tensor, entry: StateEntry) -> Tensor:
        """A new state tensor, zeros: a moment has its parameter's shape, codes and scales have one dimension."""
        name, dtype, numel = entry
        shaped = dtype.is_floating_point and not name.endswith(_SCALE)
        if self.new_state is None:
            if shaped:
                return torch.zeros_like(param, dtype=dtype, requires_grad=False)
            return torch.zeros(numel, dtype=dtype, device=param.device)
        made = self.new_state(param, dtype, name)
        if made.numel() != numel or made.dtype != dtype:
            raise UsageError(
                f"{type(self).__name__}.new_state gave {made.numel()} elements of {made.dtype} for {name} of a "
                f"parameter of shape {tuple(param.shape)}; state_layout says {numel} of {dtype}"
            )
        return made.view(param.shape if shaped else (numel,))

    def _signed(self, name: str) -> bool:
        return name not in self.positive

    def _decoded(self, param: Tensor, name: str, codes: Tensor, scales: Tensor) -> Tensor:
        return blockwise.decode(codes, scales, signed=self._signed(name)).view(param.shape)

    def _state_dtype(self, param: Tensor) -> torch.dtype:
        if self.moment_bits is not None:
            return _HELD_IN[self.moment_bits]
        if self.state_dtype is not None:
            return self.state_dtype
        return wide(param.dtype) if self.fp32_optimizer_states else param.dtype

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over groups and state; unlike in torch, moments are held as this optimizer holds them."""
        found: list[Mapping[str, Any] | None] = []

        def take(_: Any, given: dict[str, Any]) -> dict[str, Any]:
            """Without the states: torch would cast every tensor, codes too, to the dtype of its parameter."""
            saved = dict(given["state"])
            indices = chain.from_iterable(group["params"] for group in given["param_groups"])
            found.extend(saved.pop(index, None) for index in indices)
            return {**given, "state": saved}

        def put(_: Any) -> None:
            params = chain.from_iterable(group["params"] for group in self.param_groups)
            for param, saved in zip(params, found, strict=True):
                if saved is not None:
                    self.state[param] = self._restored_state(param, saved)

        # Hooks of others change the states before they are taken, and look at them when they are there.
        handles = (
            self.register_load_state_dict_pre_hook(take),
            self.register_load_state_dict_post_hook(put, prepend=True),
        )
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            for handle in handles:
                handle.remove()

    def _restored_state(self, param: Tensor, saved: Mapping[str, Any]) -> dict[str, Any]:
        """The saved state of a parameter as this optimizer keeps it, whatever held its moments."""
        state: dict[str, Any] = {}
        for name, value in saved.items():
            scales = saved.get(scale_name(name))
            if name.removesuffix(_SCALE) != name and name.removesuffix(_SCALE) in saved:
                continue  # comes with its moment
            if isinstance(value, Tensor) and isinstance(scales, Tensor):
                self._check_codes(param, name, value, scales)
                if self.moment_bits == 8:
                    state[name], state[scale_name(name)] = value.to(param.device), scales.to(param.device)
                    continue
                value = self._decoded(param, name, value, scales)
            state[name] = self._restored(param, name, value)
            if self.moment_bits == 8 and name in self.moments:
                values = state[name].to(torch.float32)
                for entry in self._layout(param, (name,)):
                    state[entry[0]] = self._memory(param, entry)
                blockwise.encode(values, state[name], state[scale_name(name)], signed=self._signed(name))
        return state

    def _check_codes(self, param: Tensor, name: str, codes: Tensor, scales: Tensor) -> None:
        needed = blockwise.blocks(param.numel())
        if codes.dtype != torch.uint8 or codes.numel() != param.numel() or scales.numel() != needed:
            raise UsageError(
                f"the state dict has {codes.numel()} codes ({codes.dtype}) and {scales.numel()} scales in {name} of a "
                f"parameter of shape {tuple(param.shape)}; expected {param.numel()} of uint8 and {needed}. It was "
                "saved from other parameters"
            )

    def _restored(self, param: Tensor, name: str, value: Any) -> Any:
        """A value of a saved state, as this optimizer keeps it."""
        if name == "step":
            return int(value)  # torch's own optimizers save a tensor
        if name in self.moments and isinstance(value, Tensor):
            return value.to(param.device, torch.float32 if self.moment_bits == 8 else self._state_dtype(param))
        return value

    def __getstate__(self) -> dict[str, Any]:
        kept: dict[str, Any] = super().__getstate__()
        return {**kept, **{name: getattr(self, name) for name in ("state_dtype", "moment_bits", *self.settings)}}
