"""Universal checkpoints: one folder per parameter with whole fp32 tensors; written from any format, and read."""
