"""Sequences that follow a JSON schema: masks of the tokens that may come next, by llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.errors import FeatureUnavailable, UsageError


class SchemaGuide:
    """One sequence's place in its grammar; `foreign` stands for the end where the model has no token for it."""

    def __init__(self, matcher: Any, bitmask: Any, vocabulary: int, foreign: int | None) -> None:
        self._matcher, self._bitmask, self._vocabulary, self._foreign = matcher, bitmask, vocabulary, foreign

    def mask(self) -> Tensor:
        """bool [vocabulary]: what may come next."""
        bits = self._bitmask(self._matcher)
        places = torch.arange(self._vocabulary)
        found: Tensor = ((bits[places // 32] >> (places % 32)) & 1).bool()
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

    def __init__(self) -> None:
        self._tables: dict[int, tuple[Any, Any]] = {}

    def make(self, schema: str | Mapping[str, Any], tokenizer: Any, vocabulary: int, eos: Sequence[int]) -> SchemaGuide:
        """A guide at the start of a schema."""
        try:
            import llguidance
            import llguidance.hf
            import llguidance.torch
        except ImportError as error:
            raise FeatureUnavailable(
                "SamplingParams.schema needs the package llguidance, which is not installed. Install it by "
                "pip install 'deepspeed[schema]'"
            ) from error
        held = self._tables.get(id(tokenizer))
        if held is None:
            table = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=list(eos) or None)
            held = self._tables[id(tokenizer)] = (tokenizer, table)  # the tokenizer stays, and so does its id
        text = schema if isinstance(schema, str) else json.dumps(schema)
        grammar = llguidance.LLMatcher.grammar_from_json_schema(text)
        problem = llguidance.LLMatcher.validate_grammar(grammar, held[1])
        if problem:
            raise UsageError(f"the JSON schema cannot be followed: {problem}")
        matcher = llguidance.LLMatcher(held[1], grammar)

        def bitmask(of: Any) -> Tensor:
            bits = llguidance.torch.allocate_token_bitmask(1, vocabulary)
            llguidance.torch.fill_next_token_bitmask(of, bits, 0)
            found: Tensor = bits[0]
            return found

        return SchemaGuide(matcher, bitmask, vocabulary, None if eos else held[1].eos_token)
