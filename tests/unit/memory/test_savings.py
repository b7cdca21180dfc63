"""Changes that save memory: none changes the samples of a step, names what is there already, or a key twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepspeed.config import load
from deepspeed.memory.savings import JobSizes, all_savings, merged, savings

SIZES = st.builds(
    JobSizes,
    micro=st.integers(1, 12),
    steps=st.integers(1, 4),
    replicas=st.sampled_from((1, 2, 64)),
    stage=st.integers(0, 3),
    bucket=st.sampled_from((0, 500_000_000)),
    states_away=st.sampled_from((0.0, 1.0)),
    parameters_away=st.booleans(),
    pipeline=st.sampled_from((1, 4)),
    recomputes=st.booleans(),
)


def config_of(sizes):
    zero = {"stage": sizes.stage, "reduce_bucket_size": sizes.bucket or 1000}
    if sizes.states_away:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": sizes.micro,
        "gradient_accumulation_steps": sizes.steps,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": zero,
    }


@given(SIZES)
def test_each_changes_something_and_leaves_the_batch(sizes):
    given_config = config_of(sizes)
    steps = [saving.keys for saving in savings(sizes) if not saving.code]
    together = dict(given_config)
    for keys in all_savings(sizes):
        assert merged(together, keys) != together
        together = merged(together, keys)
        steps.append(keys)
    for config in [merged(given_config, keys) for keys in steps] + [together]:
        assert config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] == (
            sizes.micro * sizes.steps
        )
        assert config["zero_optimization"]["stage"] >= sizes.stage
        load(config, partial=True)


@given(SIZES)
def test_texts_are_keys_of_a_config(sizes):
    texts = [str(saving) for saving in savings(sizes)]
    assert len(set(texts)) == len(texts)
    assert sum("gradient_checkpointing_enable" in text for text in texts) == (
        sizes.pipeline == 1 and not sizes.recomputes
    )
