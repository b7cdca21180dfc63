"""Did-you-mean: real typos are recognised, other people's keys are left alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.config.clean import nearest
from deepspeed.config.model import keys_of
from deepspeed.config.schema import Schema

TOP = tuple(keys_of(Schema))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("zero_optimizaton", "zero_optimization"),
        ("gradient_clipp1ng", "gradient_clipping"),
        ("gradient_cliping", "gradient_clipping"),
        ("zeroOptimization", "zero_optimization"),
        ("ZERO_OPTIMIZATION", "zero_optimization"),
        ("fp_16", "fp16"),
        ("train_micro_batch_size", "train_micro_batch_size_per_gpu"),
        ("optimiser", "optimizer"),
        ("schedular", "scheduler"),
        ("activation_checkpoint", "activation_checkpointing"),
        ("step_per_print", "steps_per_print"),
        ("comm_logger", "comms_logger"),
    ],
)
def test_typos(typed, meant):
    assert nearest(typed, TOP) == meant


@pytest.mark.parametrize("alien", ["msamp", "project", "notes", "my_company_settings", "seed", "epochs", "fp32", "x"])
def test_aliens(alien):
    assert nearest(alien, TOP) is None


@given(st.sampled_from([name for name in TOP if len(name) >= 5]), st.data())
def test_one_slip_is_always_recognised(name, data):
    position = data.draw(st.integers(0, len(name) - 1))
    typed = name[:position] + name[position + 1 :]
    if typed not in TOP:
        assert nearest(typed, TOP) is not None


@given(st.text(max_size=12), st.lists(st.text(max_size=12), max_size=5))
def test_any_text_is_answered(typed, known):
    assert nearest(typed, known) in {None, *known}
