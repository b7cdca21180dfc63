"""Sequence parallelism: ranks that share each sequence, attention over all of it, and long sequences on one rank."""
