"""How a model enters an engine: its attention calls our function, or its cache is ours, or it is refused by name."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import UsageError
from deepspeed.fusion.attention import LateRotation, late_rotation
from deepspeed.generate.attention import PagedAttentionFunction, layer_of
from deepspeed.generate.batch import Batch
from deepspeed.generate.cache import LayerShape, PagedCache, Scales
from deepspeed.generate.padded import PaddedCache, ProbeCache, padded_logits
from deepspeed.transformers.attention import configs_in, free_name, register_attention
from deepspeed.transformers.replacement import put_forward, replacement

_KINDS = ("layer_types", "layers_block_type", "block_types")
_KNOWN_KINDS = {"attention", "full_attention", "sliding_attention", "dense", "sparse", "moe"}
_PROBE_TOKENS = 64
_FP8_HEADROOM = 2.0
"""How much larger numbers may become than those of the probe, before 8-bit pages clip them."""


class ModelEntry(ABC):
    """One way to run a model over pages."""

    captured: bool
    """Whether a forward can be captured in a graph of the device."""
    how: str
    """For a reader."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layers: tuple[LayerShape, ...] = ()
        self.scales: Scales = {}
        self.rotations = list(_by_longest(model))
        self.short_context = min((length for _, length in self.rotations), default=1 << 62)
        """Tokens above which all of a sequence's keys are others."""

    @abstractmethod
    def probe(self, *, eight_bits: bool) -> int:
        """Find `layers` and `scales` by a forward of a few tokens; how many of the model's layers were seen."""

    @abstractmethod
    def logits(self, batch: Batch, ids: Tensor, cache: PagedCache) -> Tensor:
        """[wanted, vocabulary] of a batch, whose keys and values are written to the pages."""

    def close(self) -> None:  # noqa: B027
        """Undo what was registered."""


def adopt(model: nn.Module, *, deterministic: bool = False, eight_bits: bool = False) -> ModelEntry:
    """Find out how a model can be run over pages, by a forward of a few tokens; refuse it with the reason."""
    _refuse_by_kind(model)
    entry: ModelEntry
    if getattr(model, "_supports_attention_backend", False):
        entry = InterfaceEntry(model, deterministic=deterministic)
    elif eight_bits:
        raise UsageError(
            f"state_manager.kv_dtype is fp8, but {type(model).__name__} computes attention by itself, which reads its "
            "cache in the model's dtype. Set kv_dtype to auto."
        )
    else:
        entry = CacheEntry(model)
    try:
        _require_all(model, entry.probe(eight_bits=eight_bits), entry.layers)
    except (UsageError, torch.OutOfMemoryError):
        entry.close()
        raise
    except Exception as error:
        entry.close()
        raise UsageError(
            f"{type(model).__name__} cannot be served: a forward of a few tokens failed with "
            f"{type(error).__name__}: {error}"
        ) from error
    return entry


@dataclass(slots=True)
class _Seen:
    shape: LayerShape
    key: Tensor
    source: int
    """The layer whose keys and values it reads: itself, or one before."""
    largest: tuple[Tensor, Tensor] | None = None
    late: LateRotation | None = None
    """Where what is rotated comes to the attention function as it is."""


class InterfaceEntry(ModelEntry):
    """For models whose attention modules call Transformers' attention interface."""

    captured = True
    how = "the attention interface of Transformers"

    def __init__(self, model: nn.Module, *, deterministic: bool) -> None:
        super().__init__(model)
        self._configs = configs_in(model)
        self._function = PagedAttentionFunction(deterministic=deterministic)
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._name = free_name("deepspeed_generate")
        self._undo = register_attention(self._name, self._function, None)

    def close(self) -> None:
        self._undo()

    @contextmanager
    def _attention(self, name: str) -> Iterator[None]:
        before = [config._attn_implementation for config in self._configs]
        try:
            for config in self._configs:
                config._attn_implementation = name
            yield
        finally:
            for config, value in zip(self._configs, before, strict=True):
                config._attn_implementation = value

    @contextmanager
    def _rotating(self, long: Tensor) -> Iterator[None]:
        with ExitStack() as undo:
            for module, length in self.rotations:
                forward = replacement(module) or type(module).forward
                undo.callback(put_forward(module, partial(_by_sequence, forward, length, long[:, None])))
            yield

    def logits(self, batch: Batch, ids: Tensor, cache: PagedCache) -> Tensor:
        keep = {"logits_to_keep": batch.wanted} if self._keeps else {}
        with self._function.running(batch, cache), self._attention(self._name), self._rotating(batch.long):
            out = self.model(
                input_ids=ids[None], position_ids=batch.positions[None], use_cache=False, return_dict=True, **keep
            )
        logits: Tensor = out.logits[0]
        return logits if self._keeps else logits[batch.wanted]

    def probe(self, *, eight_bits: bool) -> int:
        """By what layers call the attention function with."""
        seen: dict[int, _Seen] = {}
        name = free_name("deepspeed_probe")
        undo = register_attention(name, _prober(self.model, seen, measure=eight_bits), None)
        device = torch.device(get_accelerator().current_device_name())
        config = self.model.config.get_text_config()  # type: ignore[union-attr,operator]
        count = _PROBE_TOKENS if eight_bits else 1
        ids = torch.arange(count, device=device) * 7919 % config.vocab_size
        late = [found for each in self.model.modules() if (found := late_rotation(each)) is not None]
        try:
            for each in late:
                each.how = "noted"
            with self._attention(name), torch.no_grad():
                self.model(input_ids=ids[None], position_ids=torch.arange(count, device=device)[None], use_cache=False)
        finally:
            undo()
            for each in late:
                each.how, each.given = "at once", None
        self._function.late = {layer: found.late for layer, found in seen.items() if found.late is not None}
        own = [each for each in seen.values() if each.source == each.shape.layer]
        self.layers = tuple(sorted((each.shape for each in own), key=lambda shape: shape.layer))
        self._function.sources = {layer: found.source for layer, found in seen.items()}
        limit = torch.finfo(torch.float8_e4m3fn).max
        self.scales = {
            layer: tuple((_FP8_HEADROOM * each / limit).clamp(min=1e-6) for each in found.largest)  # type: ignore[misc]
            for layer, found in seen.items()
            if found.largest is not None
        }
        return len(seen)


def _by_longest(model: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Rotary embeddings whose frequencies follow from the longest sequence of a forward, and where they change."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if "longrope" in (kinds.values() if isinstance(kinds, Mapping) else [kinds]):
            given: Any = module.config.rope_parameters  # type: ignore[union-attr]
            sets = [each for each in given.values() if isinstance(each, Mapping)] or [given]
            yield module, min(each["original_max_position_embeddings"] for each in sets if "long_factor" in each)


def _by_sequence(
    forward: Callable[..., Any],
    length: int,
    long: Tensor,
    module: nn.Module,
    x: Tensor,
    position_ids: Tensor,
    *rest: Any,
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    """What an embedding gives each token for its own sequence: `long` [tokens, 1] says which are above `length`."""
    short = forward(module, x, position_ids.clamp(max=length - 1), *rest, **kwargs)
    further = torch.cat((position_ids, position_ids.new_full((1, 1), length)), 1)
    found = forward(module, x, further, *rest, **kwargs)
    return tuple(torch.where(long, one[:, :-1], other) for one, other in zip(found, short, strict=True))


def _prober(model: nn.Module, seen: dict[int, _Seen], *, measure: bool) -> Callable[..., tuple[Tensor, None]]:
    config = model.config.get_text_config()  # type: ignore[union-attr,operator]
    kinds = getattr(config, "layer_types", None)

    def probe(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        name = type(module).__name__
        layer = layer_of(module)
        if layer in seen:
            raise UsageError(
                f"{name} cannot be served: the attention of layer {layer} runs more than once in a forward"
            )
        if (
            attention_mask is not None
            or options.get("is_causal") is False
            or getattr(module, "is_causal", True) is False
        ):
            raise UsageError(f"{name} cannot be served: its attention is not causal, or has a mask of its own")
        window = options.get("sliding_window")
        if window is None and kinds is not None and layer < len(kinds) and kinds[layer] == "sliding_attention":
            window = getattr(config, "sliding_window", None)
        source = next((number for number, each in seen.items() if each.key is key), layer)
        if source != layer and seen[source].shape.window != window:
            raise UsageError(f"{name} cannot be served: layers of unlike windows share keys")
        found = _Seen(LayerShape(layer, key.shape[1], key.shape[-1], value.shape[-1], window), key, source)
        late = late_rotation(module)
        if late is not None and late.given is not None and source == layer:
            found.late = late if late.given[0] is query and late.given[1] is key else None
        if measure:
            found.largest = tuple(each[0].float().abs().amax((1, 2)) for each in (key, value))  # type: ignore[assignment]
        seen[layer] = found
        groups = query.shape[1] // key.shape[1]
        keys, values = (each.repeat_interleave(groups, 1) for each in (key, value))
        scale = options.get("scaling")
        scores = (query.float() @ keys.float().mT) * (query.shape[-1] ** -0.5 if scale is None else scale)
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        weights = scores.masked_fill(ahead, float("-inf")).softmax(-1).to(value.dtype)
        return (weights @ values).transpose(1, 2).contiguous(), None

    return probe


class CacheEntry(ModelEntry):
    """For models that compute attention by themselves, over a cache that they are handed."""

    captured = False
    how = "a Transformers cache over the pages, because its modules compute attention by themselves"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._accepted = frozenset(inspect.signature(model.forward).parameters)
        self._pads = True

    def logits(self, batch: Batch, ids: Tensor, cache: PagedCache) -> Tensor:
        return padded_logits(self._forward, batch, ids, cache, pads=self._pads)

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor, past: PaddedCache | ProbeCache) -> Tensor:
        """Logits [rows, tokens, vocabulary]."""
        extra = {"position_ids": positions} if "position_ids" in self._accepted else {}
        out = self.model(
            input_ids=ids, attention_mask=mask, past_key_values=past, use_cache=True, return_dict=True, **extra
        )
        logits: Tensor = out.logits
        return logits

    def probe(self, *, eight_bits: bool) -> int:
        """By what layers ask the cache for; also what the model makes of padding."""
        if "past_key_values" not in self._accepted:
            return 0
        past, begun = ProbeCache(), ProbeCache()
        whole = self._probed([1, 2, 3], [1, 1, 1], past)
        self.layers = past.layers
        if not _alike(whole[:2], self._probed([1, 2], [1, 1], begun), self.model.dtype):
            raise UsageError(
                f"{type(self.model).__name__} cannot be served: its attention is not causal, since a token changes "
                "the logits of those before it."
            )
        # Rows of a batch are padded by other lengths in each step, but keys stay as they were computed.
        padded = self._probed([3], [0, 1, 1, 1], ProbeCache(begun)) if self.layers else whole[2:]
        self._pads = _alike(whole[2:], padded, self.model.dtype)
        return len(self.layers)

    @torch.no_grad()
    def _probed(self, tokens: list[int], mask: list[int], past: ProbeCache) -> Tensor:
        """Logits [tokens, vocabulary] of one row, whose `mask` has the tokens before, too."""
        device = torch.device(get_accelerator().current_device_name())
        ids, seen = (torch.tensor([each], device=device) for each in (tokens, mask))
        positions = (seen.cumsum(1) - 1).clamp(min=0)[:, -len(tokens) :]
        return self._forward(ids, positions, seen, past)[0].float()


def _alike(logits: Tensor, others: Tensor, dtype: Any) -> bool:
    """Whether two computations of the same logits differ by rounding only."""
    within = 1e-3 if dtype == torch.float32 else 5e-2
    return bool((logits - others).abs().max() <= within * logits.std())


def _refuse_by_kind(model: nn.Module) -> None:
    """Refuse models whose layers keep something else than keys and values."""
    config = getattr(model, "config", None)
    name = type(model).__name__
    if config is None or not callable(getattr(config, "get_text_config", None)):
        raise UsageError(f"{name} cannot be served: it is no model of Transformers with a config")
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError(
            f"{name} cannot be served: it is an encoder-decoder, whose {_named(model, 'encoder')} reads a whole "
            "prompt. Use deepspeed.init_inference and its generate."
        )
    text = config.get_text_config()
    kinds = [str(each) for key in _KINDS for each in getattr(text, key, None) or ()]
    other = sorted(set(kinds) - _KNOWN_KINDS)
    if other or getattr(model, "_is_stateful", False):
        what = f"layers of the type {other[0]!r}" if other else "layers that keep a state"
        raise UsageError(
            f"{name} cannot be served: it has {what} ({_layer_name(model)}), and the cache holds keys and values of "
            "attention only. Use model.generate of Transformers."
        )


def _require_all(model: nn.Module, found: int, layers: Sequence[LayerShape]) -> None:
    expected = model.config.get_text_config().num_hidden_layers  # type: ignore[union-attr,operator]
    if found != expected or not layers:
        raise UsageError(
            f"{type(model).__name__} cannot be served: {found} of its {expected} layers have attention that a "
            f"paged cache can hold; its layers are {_layer_name(model)}."
        )


def _layer_name(model: nn.Module) -> str:
    """The module in the model's layers that holds a state, by its class; else the first layer."""
    states = ("mamba", "ssm", "rwkv", "recurrent", "delta", "conv", "xlstm", "mixer")
    inside = ((name, type(each).__name__) for name, each in model.named_modules() if any(map(str.isdigit, name)))
    named = [f"{name}: {kind}" for name, kind in inside if any(state in kind.lower() for state in states)]
    if named:
        return named[0]
    lists = [(name, each) for name, each in model.named_modules() if isinstance(each, nn.ModuleList) and len(each)]
    return f"{lists[0][0]}.0: {type(lists[0][1][0]).__name__}" if lists else type(model).__name__


def _named(model: nn.Module, part: str) -> str:
    return next((f"{name}: {type(each).__name__}" for name, each in model.named_modules() if name.endswith(part)), part)
