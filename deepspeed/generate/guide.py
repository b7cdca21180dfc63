"""Sequences that follow a JSON schema: masks of the tokens that may come next, by llguidance."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.errors import FeatureUnavailable, UsageError


class SchemaGuide:
    """One sequence's place in its grammar; `foreign` stands for the end where the model has no token for it."""

    def __init__(self, matcher: Any, vocabulary: int, foreign: int | None) -> None:
        self._matcher, self._vocabulary, self._foreign = matcher, vocabulary, foreign

    def mask(self) -> Tensor:
        """bool [vocabulary]: what may come next."""
        from llguidance.torch import allocate_token_bitmask, fill_next_token_bitmask

        bits = allocate_token_bitmask(1, self._vocabulary)
        fill_next_token_bitmask(self._matcher, bits, 0)
        places = torch.arange(self._vocabulary)
        found: Tensor = ((bits[0][places // 32] >> (places % 32)) & 1).bool()
        if self._foreign is not None:
            found[self._foreign] = False
        return found

    def take(self, tokens: Sequence[int]) -> None:
        """The sequence went on with these."""
        if not self._matcher.consume_tokens(list(tokens)):
            raise AssertionError(f"the schema does not allow {list(tokens)}, which its own mask let through")

    @property
    def complete(self) -> bool:
        """Whether nothing can follow."""
        stopped: bool = self._matcher.is_stopped()
        return stopped


class SchemaGuides:
    """Makes guides; the tokenizer's tables are built once."""

    def __init__(self, vocabulary: int, eos: Iterable[int]) -> None:
        self._vocabulary, self._eos = vocabulary, sorted(eos)
        self._tables: dict[int, tuple[Any, Any]] = {}

    def make(self, schema: str | Mapping[str, Any], tokenizer: Any) -> SchemaGuide:
        """A guide at the start of a schema."""
        try:
            import llguidance
            import llguidance.hf
        except ImportError as error:
            raise FeatureUnavailable(
                "SamplingParams.schema needs the package llguidance, which is not installed. Install it by "
                "pip install 'deepspeed[schema]'"
            ) from error
        held = self._tables.get(id(tokenizer))
        if held is None:
            table = llguidance.hf.from_tokenizer(tokenizer, n_vocab=self._vocabulary, eos_token=self._eos or None)
            held = self._tables[id(tokenizer)] = (tokenizer, table)  # the tokenizer stays, and so does its id
        text = schema if isinstance(schema, str) else json.dumps(schema)
        grammar = llguidance.LLMatcher.grammar_from_json_schema(text)
        problem = llguidance.LLMatcher.validate_grammar(grammar, held[1])
        if problem:
            raise UsageError(f"the JSON schema cannot be followed: {problem}")
        matcher = llguidance.LLMatcher(held[1], grammar)
        return SchemaGuide(matcher, self._vocabulary, None if self._eos else held[1].eos_token)
