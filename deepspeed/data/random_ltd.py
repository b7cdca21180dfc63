"""Random layer token drop: middle layers compute a random part of the tokens, which grows to all of them."""

from __future__ import annotations

import inspect
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from deepspeed.config.data import RandomLTDConfig
from deepspeed.data.curriculum import Ramp
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.ops.random_ltd import (
    GatherTokens,
    ScatterTokens,
    gpt_sample_tokens,
    mask_gather_bert,
    mask_gather_gpt,
    token_gather,
)

__all__ = [
    "RandomLTDScheduler",
    "RandomLayerTokenDrop",
    "convert_to_random_ltd",
    "join_layers",
    "remove_random_ltd_state_dict",
    "save_without_random_ltd",
]

_LAYER = "random_ltd_layer"
_PATH = "data_efficiency.data_routing.random_ltd"
_BY_TOKEN = ("position_embeddings", "position_ids")
"""Arguments of layers of Transformers that belong to tokens."""


class RandomLTDScheduler:
    """How many tokens layers keep at each step, and how many layer tokens were consumed."""

    def __init__(self, config: Mapping[str, Any] | RandomLTDConfig, global_batch_size: int | None = None) -> None:
        self.section = config if isinstance(config, RandomLTDConfig) else _read(config)
        size = self.section.global_batch_size if global_batch_size is None else global_batch_size
        self.global_batch_size = int(size or 1)
        self._ramp = Ramp.of_tokens(self.section.random_ltd_schedule)
        self.random_ltd_layer_num = self.section.random_ltd_layer_num or 0
        self.model_layer_num = self.section.total_layer_num or 0
        self.max_value = self.section.random_ltd_schedule.max_value or 0
        self.draw: tuple[int, int] = (0, 0)
        """What decides which tokens are kept: the micro step, and the rank among those with other samples."""
        self.reset_to_init()

    def reset_to_init(self) -> None:
        """Go back to before the first step."""
        self.current_seq = int(self._ramp.at(0))
        self.consumed_layer_tokens = 0
        self._step = -1

    def get_current_seq(self) -> int:
        """Tokens that layers keep."""
        return self.current_seq

    def update_seq(self, global_steps: int) -> int:
        """Go to a step; its layer tokens count once."""
        self.current_seq = int(self._ramp.at(global_steps))
        if global_steps != self._step:
            self.consumed_layer_tokens += self._tokens_of(self.current_seq)
            self._step = global_steps
        return self.current_seq

    def get_total_layer_tokens(self, train_iters: int) -> int:
        """Layer tokens of a training of so many steps."""
        return sum(self._tokens_of(int(self._ramp.at(step))) for step in range(train_iters))

    def _tokens_of(self, kept: int) -> int:
        others = self.model_layer_num - self.random_ltd_layer_num
        return self.global_batch_size * (kept * self.random_ltd_layer_num + self.max_value * others)

    def state_dict(self) -> dict[str, int]:
        return {
            "current_seq": self.current_seq,
            "consumed_layer_tokens": self.consumed_layer_tokens,
            "global_step": self._step,
        }

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Continue where the state was taken."""
        self.current_seq = state_dict["current_seq"]
        self.consumed_layer_tokens = state_dict["consumed_layer_tokens"]
        self._step = state_dict["global_step"]

    get_state, set_state = state_dict, load_state_dict


class RandomLayerTokenDrop(nn.Module):
    """A layer that computes a part of the tokens in training, once an engine joined it to a schedule."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.random_ltd_layer = layer
        self.random_ltd_scheduler: RandomLTDScheduler | None = None
        self.random_ltd_layer_id = 0
        self._names = list(inspect.signature(layer.forward).parameters)[1:]
        """The arguments of the layer behind its hidden states."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__(_LAYER), name)

    def init_config(self, scheduler: RandomLTDScheduler | None, random_ltd_layer_id: int) -> None:
        """Drop tokens as a schedule says; with None no longer."""
        self.random_ltd_scheduler, self.random_ltd_layer_id = scheduler, random_ltd_layer_id

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the layer; tokens that were dropped come out as they went in."""
        scheduler = self.random_ltd_scheduler
        if scheduler is None or not self.training:
            return self.random_ltd_layer(hidden_states, *args, **kwargs)
        section = scheduler.section
        first = section.hidden_state_order == "batch_seq_dim"
        batch, length = hidden_states.shape[:2] if first else (hidden_states.shape[1], hidden_states.shape[0])
        kept = min(scheduler.get_current_seq(), length)
        if kept == length:
            return self.random_ltd_layer(hidden_states, *args, **kwargs)
        seed = (scheduler.draw[0] * 4099 + scheduler.draw[1]) * 8191 + self.random_ltd_layer_id
        chance = torch.Generator().manual_seed(seed % 2**63)
        index = gpt_sample_tokens(kept, length, batch, 1, hidden_states.device, None, chance)[0][0]
        _, part = GatherTokens.apply(hidden_states, index, first)
        named = self._names[: len(args)]
        given = self._of_tokens(section, {**dict(zip(named, args, strict=False)), **kwargs}, index, length)
        args = (*(given.pop(name) for name in named), *args[len(named) :])
        result = self.random_ltd_layer(part, *args, **given)
        tupled = isinstance(result, tuple)
        whole = ScatterTokens.apply(hidden_states, result[0] if tupled else result, index, first)
        return (whole, *result[1:]) if tupled else whole

    def _of_tokens(self, section: RandomLTDConfig, given: dict[str, Any], index: Tensor, length: int) -> dict[str, Any]:
        """What the layer is called with, for the kept tokens; a mask that is None leaves nothing out."""
        name, layer = section.model_mask_name or "", type(self.random_ltd_layer).__name__
        encoder, mask = section.model_type == "encoder", given.get(name)
        if encoder and name not in given:
            raise UsageError(
                f"{_PATH}.model_mask_name is {name!r}, and {layer} was called without such an argument; an encoder's "
                "mask must follow its tokens. Name the argument of the mask"
            )
        if mask is not None and not isinstance(mask, Tensor):
            raise UsageError(
                f"{_PATH}: {layer} was called with {name} of {type(mask).__name__}, which cannot follow its tokens; "
                "use attention whose mask is a tensor, such as attn_implementation='sdpa'"
            )

        def part(value: Any) -> Any:
            if isinstance(value, (tuple, list)):
                return type(value)(map(part, value))
            if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length:
                return token_gather(value.expand(len(index), *value.shape[1:]), index)
            return value

        found = {key: part(value) if key in _BY_TOKEN else value for key, value in given.items()}
        if mask is not None and mask.dim() == 2:
            found[name] = token_gather(mask.expand(len(index), -1), index)
        elif mask is not None:
            found[name] = mask_gather_bert(mask, index[None])[0] if encoder else mask_gather_gpt(mask, index.shape[1])
        return found


def convert_to_random_ltd(model: nn.Module, convert_type: type[nn.Module]) -> nn.Module:
    """Wrap every layer of a class; call it before `deepspeed.initialize`, which joins them to the config."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        if not isinstance(parent, RandomLayerTokenDrop)
        for name, child in parent.named_children()
        if isinstance(child, convert_type)
    ]
    if not found:
        raise UsageError(f"convert_to_random_ltd: {type(model).__name__} has no layer of {convert_type.__name__}")
    for parent, name, child in found:
        setattr(parent, name, RandomLayerTokenDrop(child))
    return model


def remove_random_ltd_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The same state under the names of the model that was not converted."""
    return {name.replace(f"{_LAYER}.", ""): value for name, value in state_dict.items()}


def save_without_random_ltd(model: nn.Module) -> dict[str, Any]:
    """The state dict of a converted model as that of the model before."""
    return remove_random_ltd_state_dict(model.state_dict())


def join_layers(
    model: nn.Module, section: RandomLTDConfig, samples: int, here: Container[int] | None = None
) -> RandomLTDScheduler:
    """Join the layers that the config numbers to one schedule; `here` are those of this stage of a pipeline."""
    scheduler = RandomLTDScheduler(section, samples)
    converted = {name: each for name, each in model.named_modules() if isinstance(each, RandomLayerTokenDrop)}
    joined: Sequence[tuple[str, RandomLayerTokenDrop, int]] = [
        (name, each, number)
        for name, each in converted.items()
        for number in section.random_ltd_layer_id
        if str(number) in name.split(".")
    ]
    listed = section.random_ltd_layer_id
    expected = section.random_ltd_layer_num if here is None else sum(number in here for number in listed)
    if len(joined) != expected:
        raise DeepSpeedConfigError(
            f"{_PATH}.random_ltd_layer_id names {listed}, and {len(joined)} layers of "
            f"{type(model).__name__} have such a number and were converted; expected {expected}. "
            f"Converted layers: {', '.join(converted) or 'none'}. Call convert_to_random_ltd(model, class of layers) "
            "before deepspeed.initialize",
            path=f"{_PATH}.random_ltd_layer_id",
        )
    for _, each, number in joined:
        each.init_config(scheduler, number)
    return scheduler


def _read(config: Mapping[str, Any]) -> RandomLTDConfig:
    known = {name: value for name, value in config.items() if name in RandomLTDConfig.model_fields}
    try:
        return RandomLTDConfig.model_validate({**known, "enabled": True})
    except ValidationError as error:
        raise DeepSpeedConfigError(f"{_PATH}: {error.errors()[0]['msg']}", path=_PATH) from error
