"""Orchestration: the engine and its collaborators."""
