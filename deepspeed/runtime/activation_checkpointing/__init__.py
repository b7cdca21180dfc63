"""Activation checkpointing: inputs of a call are kept, sharded or moved if wished, and the call is run again later."""

from __future__ import annotations

from deepspeed.runtime.activation_checkpointing import checkpointing

__all__ = ["checkpointing"]
