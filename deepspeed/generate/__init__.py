"""Paged generation: sequences, cache blocks, the schedule, and the loop that runs them on Transformers' modules."""
