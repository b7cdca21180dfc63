"""GRPOTrainer, unchanged, generates by the hybrid engine: completions and losses of a plain run."""

from __future__ import annotations

import pytest

import deepspeed
from tests.clients import tiny
from tests.clients.test_trl_trainers import model as reference
from tests.clients.trainers import arguments, auto, column
from tests.harness import ranks


def fine_tune(folder, config=None, **options):
    """The trainer, and all completions; it learns from the distance to a reference, since all of a group are equal."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    seen = []

    def reward(completions, **_):
        seen.extend(completions)
        return [0.0] * len(completions)

    policy = tiny.llama(seed=1)
    policy.config._name_or_path = reference(folder).config._name_or_path

    made = arguments(
        folder,
        GRPOConfig,
        deepspeed=config,
        bf16=False,
        num_generations=2,
        max_completion_length=6,
        top_k=1,  # what is sampled is the most probable token
        beta=1.0,
        max_steps=3,
        **options,
    )
    trainer = GRPOTrainer(
        model=policy,
        args=made,
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": [text[: 4 + 3 * at] for at, text in enumerate(tiny.sentences(6))]}),
        processing_class=tiny.tokenizer(),
    )
    trainer.train()
    return trainer, seen


def hybrid(stage, **keys):
    return {**auto(stage), "hybrid_engine": {"enabled": True, **keys}}


@ranks(2)
def test_grpo(tmp_path):
    plain, said = fine_tune(tmp_path)
    for stage, keys, options in (
        (3, {}, {}),
        (2, {"release_inference_cache": True}, {}),
        (3, {"offload_states": True}, {"use_transformers_continuous_batching": True}),
    ):
        trained, repeated = fine_tune(tmp_path, hybrid(stage, **keys), **options)
        engine = trained.model_wrapped
        assert type(engine) is deepspeed.DeepSpeedHybridEngine
        assert engine._generation._paged._reasons == set(), "pages served every call"
        assert repeated == said
        assert column(trained) == pytest.approx(column(plain), abs=1e-5)
