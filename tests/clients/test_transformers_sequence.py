"""Models of Transformers over sequences that ranks share, against the same training of whole sequences."""

from __future__ import annotations

from tests.clients.sequences import Case, plain_training, training
from tests.closeness import assert_same_training
from tests.harness import ranks

TWO = [
    Case("llama", 0, "ulysses"),
    Case("llama", 3, "auto", data="packed"),
    Case("qwen2", 1, "ring", accumulation=2, clip=0.3),
    Case("mistral", 3, "ring", data="padded"),
    Case("gpt_neox", 2, "ulysses", rows=1),
    Case("gpt2", 1, "auto", data="packed"),
    Case("bert", 0, "auto", data="padded"),
    Case("qwen3", 3, "ulysses", data="padded", checkpoints=True),
    Case("llama", 0, "ring", data="half", checkpoints=True, rows=1),
    Case("llama", 1, "ulysses", dtype="bf16"),
]
FOUR = [
    Case("llama", 3, "auto", options={"num_attention_heads": 4, "num_key_value_heads": 2}),
    Case("mistral", 1, "ring", options={"sliding_window": 5}, data="packed"),
    Case("qwen2", 0, "ulysses", options={"num_attention_heads": 6, "num_key_value_heads": 2}, data="half"),
    Case("llama", 3, "ulysses", sp=2, clip=0.3, accumulation=2),
]


def compare(cases):
    for case in cases:
        found, expected = training(case), plain_training(case)
        try:
            assert_same_training(found, expected)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@ranks(2)
def test_two_ranks():
    compare(TWO)


@ranks(4)
def test_four_ranks():
    compare(FOUR)
