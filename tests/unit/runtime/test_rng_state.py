"""Random numbers after `restore_states` are those that came after `capture_states`, also by way of a file."""

from __future__ import annotations

import random

import numpy as np
import torch

from deepspeed.checkpoint.formats.values import plain
from deepspeed.runtime.rng import capture_states, restore_states


def draw():
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()


def test_all_generators(tmp_path):
    random.gauss(0, 1)
    np.random.randn()  # each keeps a second number for later
    torch.save(plain(capture_states(), "state"), tmp_path / "state.pt")
    wanted = draw()
    draw()
    restore_states(torch.load(tmp_path / "state.pt", weights_only=True))
    assert draw() == wanted


def test_what_was_not_captured_stays():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    restore_states({})
    assert torch.equal(torch.get_rng_state(), before)
