"""The optimizer types that scripts compare with, as `deepspeed.runtime.config` publishes them."""

from __future__ import annotations

__all__ = [
    "ADAGRAD_OPTIMIZER",
    "ADAMW_OPTIMIZER",
    "ADAM_OPTIMIZER",
    "LAMB_OPTIMIZER",
    "LION_OPTIMIZER",
    "MUON_OPTIMIZER",
]

ADAGRAD_OPTIMIZER = "adagrad"
ADAMW_OPTIMIZER = "adamw"
ADAM_OPTIMIZER = "adam"
LAMB_OPTIMIZER = "lamb"
LION_OPTIMIZER = "lion"
MUON_OPTIMIZER = "muon"
