"""The optimizer step: masters, norm, update, and the optimizer that users get."""
