"""The page of causal models says what happens: Transformers' own tokens, or a refusal with its reason."""

from __future__ import annotations

import re

import pytest

from tests.harness import ROOT
from tests.unit.generate.causal_models import causal_kinds, outcome

PAGE = (ROOT / "docs" / "causal_models.md").read_text()
ROWS = dict(re.findall(r"^\| `(?!model_type`)([^`]+)` \| (.*) \|$", PAGE, re.MULTILINE))


def test_the_page_lists_every_model() -> None:
    assert [kind for kind in causal_kinds() if kind not in ROWS] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["blt", "cpmant", "git", "gemma4_text", "gpt_neox_japanese", "roformer"])
def test_some_models(kind: str) -> None:
    """A forward that fails; masks, shared keys, views and positions of their own."""
    assert outcome(kind) == ROWS[kind]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROWS)
def test_every_model(kind: str) -> None:
    assert outcome(kind) == ROWS[kind]
