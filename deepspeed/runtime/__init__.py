"""Orchestration: the engine and its collaborators."""

from deepspeed._package import lazy

__all__: list[str] = []

__getattr__ = lazy(__name__, {})
