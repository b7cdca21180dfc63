"""The loss scale under the names that DeepSpeed's checkpoints use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepspeed.precision.scale import DynamicScale, LossScale, NoScale

__all__ = ["attributes_of", "continue_scale"]

# ours → DeepSpeed's
_NAMES = {
    "scale": "cur_scale",
    "step": "cur_iter",
    "last_overflow": "last_overflow_iter",
    "hysteresis_left": "cur_hysteresis",
    "skipped_in_a_row": "_overflows_in_a_row",
}


def attributes_of(scale: LossScale) -> dict[str, Any] | None:
    """What DeepSpeed's scaler objects know; None where the loss is not scaled."""
    if isinstance(scale, NoScale):
        return None
    if not isinstance(scale, DynamicScale):
        return {"cur_scale": scale.value, "dynamic": False}
    return {
        **{_NAMES[name]: value for name, value in scale.state_dict().items()},
        "dynamic": True,
        "scale_factor": scale.factor,
        "scale_window": scale.window,
        "min_scale": scale.minimum,
        "delayed_shift": scale.hysteresis,
        "consecutive_hysteresis": scale.consecutive_hysteresis,
        "raise_error_at_min_scale": scale.raise_at_minimum,
        "dtype": torch.float16,
    }


def continue_scale(scale: LossScale, attributes: Mapping[str, Any] | None) -> None:
    """Go on where a saved scale was; one that was of another kind has nothing to go on from."""
    if attributes is None or not attributes.get("dynamic") or not isinstance(scale, DynamicScale):
        return
    # DeepSpeed's stage 0 stores no hysteresis, and it never counts overflows in a row.
    state = {**scale.state_dict(), "hysteresis_left": scale.hysteresis, "skipped_in_a_row": 0}
    state.update({ours: attributes[theirs] for ours, theirs in _NAMES.items() if theirs in attributes})
    scale.load_state_dict(state)
