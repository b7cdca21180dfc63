"""Transformers' `generate` by paged generation: what it takes is read, or said why Transformers itself is needed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from deepspeed.config.inference import AllocationMode, DeepSpeedInferenceConfig, RaggedInferenceEngineConfig
from deepspeed.config.memory import MemoryConfig
from deepspeed.errors import DeepSpeedError, UsageError
from deepspeed.generate.llm import LLM, Completion
from deepspeed.generate.params import SamplingParams
from deepspeed.log import logger

_READ = {
    "bos_token_id",
    "decoder_start_token_id",
    "do_sample",
    "eos_token_id",
    "max_length",
    "max_new_tokens",
    "min_length",
    "min_new_tokens",
    "min_p",
    "num_return_sequences",
    "pad_token_id",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
    "transformers_version",
    "use_cache",
}
"""Keys of a generation config that paged generation follows, or that say nothing about its tokens."""
_INERT: Mapping[str, object] = {
    "early_stopping": False,
    "num_beams": 1,
    "typical_p": 1.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "encoder_repetition_penalty": 1.0,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "use_cache": True,
}
_OF_ASSISTANTS = ("num_assistant", "assistant_", "target_lookbehind", "prefill_chunk_size", "disable_compile")
_ARGUMENTS = {
    "attention_mask",
    "generation_config",
    "input_ids",
    "inputs",
    "streamer",
    "synced_gpus",
}


T = TypeVar("T")


class _Unsuited(Exception):
    """Why pages cannot serve a call."""


@dataclass(frozen=True)
class _Call:
    ids: Tensor
    mask: Tensor | None
    prompts: list[list[int]]
    params: SamplingParams
    pad: int
    streamer: Any


class PagedGenerate:
    """`generate` of one model; the cache is made for the first call that needs it, and for a larger one anew."""

    def __init__(self, model: nn.Module, config: DeepSpeedInferenceConfig, *, streams: bool = False) -> None:
        """`streams`: weights of the model come when they are used, which graphs of the device do not know."""
        self._model, self._config, self._streams = model, config, streams
        self._llm: LLM | None = None
        self._rows = 0
        self._reasons: set[str] = set()
        self._never: str | None = None

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """What Transformers returns: ids [batch × n, length]; None where Transformers itself has to do it."""
        return self._served(self._run, inputs, kwargs)

    def complete(self, *inputs: Any, **kwargs: Any) -> list[Completion] | None:
        """The continuations of a call of `generate`, with the log-probabilities of their tokens; None as above."""
        return self._served(partial(self._completions, logprobs=0), inputs, kwargs)

    def _served(self, make: Callable[[_Call], T], inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> T | None:
        try:
            return make(self._read(inputs, kwargs))
        except _Unsuited as reason:
            if str(reason) not in self._reasons:
                self._reasons.add(str(reason))
                logger.info("generate() runs in Transformers: %s", reason)
            return None

    def close(self) -> None:
        """Free the cache."""
        if self._llm is not None:
            self._llm.close()
            self._llm = None

    def _read(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Call:
        if self._never is not None:
            raise _Unsuited(self._never)
        given = {name: value for name, value in kwargs.items() if value is not None}
        if inputs:
            given = {"inputs": inputs[0], **given}
        if len(inputs) > 1:
            raise _Unsuited("more than one argument is given without its name")
        config = self._generation_config(given.get("generation_config"))
        left = config.update(**{name: value for name, value in kwargs.items() if name not in _ARGUMENTS})
        left = {name: value for name, value in left.items() if value is not None}
        ids = given.get("input_ids", given.get("inputs"))
        if left:
            raise _Unsuited(f"it is given {', '.join(sorted(left))}")
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or not ids.numel():
            raise _Unsuited("the prompt is no tensor of token ids [batch, length]")
        for name, value in config.to_diff_dict().items():
            ignored = name.startswith(("_", *_OF_ASSISTANTS)) or value is None
            if not (name in _READ or ignored or (name in _INERT and value == _INERT[name]) or value is False):
                raise _Unsuited(f"it is asked for {name}={value!r:.60}")
        if config.use_cache is False:
            raise _Unsuited("use_cache is false")
        return self._call(config, ids, given)

    def _generation_config(self, given: Any) -> Any:
        """A copy of the call's or the model's config; what the call's does not say, the model's does."""
        own: Any = self._model.generation_config
        if not hasattr(own, "to_diff_dict"):
            raise _Unsuited("the model has no generation config")
        config = copy.deepcopy(own if given is None else given)
        for name, value in own.to_dict().items():
            if getattr(config, name, None) is None:
                setattr(config, name, value)
        return config

    def _call(self, config: Any, ids: Tensor, given: Mapping[str, Any]) -> _Call:
        length, rows = ids.shape[1], ids.shape[0]
        count = config.num_return_sequences or 1
        streamer = given.get("streamer")
        if streamer is not None and rows * count > 1:
            raise _Unsuited("a streamer takes one sequence")
        if count > 1 and not config.do_sample:
            raise _Unsuited("several sequences of one prompt without sampling")
        ends = [] if config.eos_token_id is None else torch.as_tensor(config.eos_token_id).flatten().tolist()
        pad = config.pad_token_id if config.pad_token_id is not None else (ends[0] if ends else 0)
        mask = given.get("attention_mask")
        if mask is None and config.pad_token_id is not None and config.pad_token_id not in ends:
            found = ids != config.pad_token_id
            mask = found if not bool(found.all()) else None
        prompts = _prompts(ids, mask)
        new = self._new_tokens(config, length, given="max_length" in given)
        if length + new > self._config.max_out_tokens:
            raise _Unsuited(
                f"{length} + {new} tokens are more than max_out_tokens ({self._config.max_out_tokens}), for which the "
                "cache is made"
            )
        text = self._model.config.get_text_config()  # type: ignore[union-attr,operator]
        most = self._positions()
        if most is not None and length + new > most:
            raise _Unsuited(f"{length} + {new} tokens are more than the {most} positions of the model")
        least = config.min_new_tokens or max((config.min_length or 0) - length, 0)
        sampled = bool(config.do_sample)
        try:
            params = SamplingParams(
                max_tokens=new,
                min_tokens=min(int(least), new),
                n=count,
                temperature=_or(config.temperature, 1.0) if sampled else 0.0,
                top_k=_or(config.top_k, 50) if sampled else 0,
                top_p=_or(config.top_p, 1.0) if sampled else 1.0,
                min_p=_or(config.min_p, 0.0) if sampled else 0.0,
                repetition_penalty=_or(config.repetition_penalty, 1.0),
                stop_token_ids=tuple(end for end in ends if end < text.vocab_size),  # others never come
                ignore_eos=True,
            )
        except UsageError as error:
            raise _Unsuited(str(error)) from error
        if sampled:
            params = replace(params, seed=int(torch.randint(0, 2**62, ())))
        return _Call(ids, mask, prompts, params, int(pad), streamer)

    def _new_tokens(self, config: Any, length: int, *, given: bool) -> int:
        if config.max_new_tokens is not None:
            new = int(config.max_new_tokens)
        elif config.max_length is None or (config.max_length == type(config)().max_length and not given):
            most = self._positions()
            new = 20 if most is None else min(20, most - length)
        else:
            new = int(config.max_length) - length
        if new < 1:
            raise _Unsuited(f"the prompt of {length} tokens leaves no room for a new one")
        return new

    def _positions(self) -> int | None:
        """The most tokens of a sequence that the model was made for, if it says so."""
        text = self._model.config.get_text_config()  # type: ignore[union-attr,operator]
        return getattr(text, "max_position_embeddings", None)

    def _run(self, call: _Call) -> Tensor:
        if call.streamer is not None:
            llm = self._engine(len(call.prompts) * call.params.n)
            call.streamer.put(call.ids.cpu())
            tokens = []
            for token in llm.stream(call.prompts[0], call.params):
                if token.finish_reason == "error":
                    raise UsageError("generate(): the model's logits are not finite")
                if token.id >= 0:
                    tokens.append(token.id)
                    call.streamer.put(torch.tensor([token.id]))
            call.streamer.end()
            found = [tokens]
        else:
            found = [one.token_ids for one in self._completions(call)]
        longest = max(map(len, found))
        shape = len(found), call.ids.shape[1] + longest
        out = call.ids.new_full(shape, call.pad, dtype=torch.int64)  # whatever the prompt's
        out[:, : call.ids.shape[1]] = call.ids.repeat_interleave(call.params.n, 0)
        for row, tokens in zip(out[:, call.ids.shape[1] :], found, strict=True):
            row[: len(tokens)] = torch.tensor(tokens, dtype=out.dtype)
        return out

    def _completions(self, call: _Call, logprobs: int | None = None) -> list[Completion]:
        llm = self._engine(len(call.prompts) * call.params.n)
        each = [_of_row(call.params, row, logprobs) for row in range(len(call.prompts))]
        done = llm.generate(call.prompts, each, progress=False)
        if any(one.finish_reason == "error" for one in done):
            raise UsageError("generate(): the model's logits are not finite")
        return done

    def _engine(self, rows: int) -> LLM:
        """An engine whose cache has room for so many sequences; all of them run if it has less, one after the other."""
        if self._llm is not None and self._rows >= rows:
            return self._llm
        self.close()
        config = self._ragged(rows)
        try:
            self._llm = LLM(self._model, config)
        except DeepSpeedError as error:
            self._never = str(error)
            raise _Unsuited(self._never) from error
        self._rows = rows
        return self._llm

    def _ragged(self, rows: int) -> RaggedInferenceEngineConfig:
        """The config's `ragged`, with a cache for so many sequences unless it says its size.

        Weights may change between calls, so that no prefix is kept; and they are quantised, split and fused by now.
        """
        given = self._config.ragged
        made = RaggedInferenceEngineConfig() if given is None else given.model_copy(deep=True)
        manager = made.state_manager
        if given is None or "prefix_cache" not in given.state_manager.model_fields_set:
            manager.prefix_cache = False
        context = self._config.max_out_tokens
        if given is None or "memory_config" not in given.state_manager.model_fields_set:
            blocks = -(-context // manager.block_size)
            manager.memory_config = {"mode": "allocate", "size": max(rows, 1) * blocks + 1}  # type: ignore[assignment]
        if given is None or "max_context" not in given.state_manager.model_fields_set:
            manager.max_context = context
        cache, least = manager.memory_config, self._config.min_out_tokens
        room = cache.size * manager.block_size if cache.mode is AllocationMode.ALLOCATE else manager.max_context
        if min(room, manager.max_context) < least:
            raise UsageError(
                f"min_out_tokens is {least}, but ragged.state_manager has room for sequences of "
                f"{min(room, manager.max_context)} tokens (max_context, memory_config); lower the first or raise those"
            )
        made.quantization.quantization_mode = None
        made.tensor_parallel.tp_size = 1
        made.kernels = False
        made.cuda_graphs = made.cuda_graphs and not self._streams
        made.memory = MemoryConfig()
        return made


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _of_row(params: SamplingParams, row: int, logprobs: int | None) -> SamplingParams:
    """Every prompt of a call draws its own numbers."""
    seed = None if params.seed is None else (params.seed + 1_000_003 * row) % 2**62
    return replace(params, seed=seed, logprobs=logprobs)


def _prompts(ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """The tokens of each row without the padding before them."""
    if mask is None:
        return [[int(token) for token in row] for row in ids.tolist()]
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        raise _Unsuited("the attention mask has not the shape of the prompt")
    found = []
    for row, kept in zip(ids.tolist(), mask.ne(0).tolist(), strict=True):
        start = kept.index(True) if True in kept else len(kept)
        if start == len(kept) or not all(kept[start:]):
            raise _Unsuited("the attention mask hides other tokens than those at the start of a row")
        found.append([int(token) for token in row[start:]])
    return found
