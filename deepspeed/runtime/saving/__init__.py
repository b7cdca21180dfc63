"""The engine's side of checkpoints: what is saved, how it is restored."""
