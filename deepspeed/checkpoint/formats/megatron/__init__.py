"""Pipeline × tensor × data grids of ranks, for offline tools that look into Megatron-style checkpoints."""
