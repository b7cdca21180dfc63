"""Triton kernels of the optimizers: one way over many tensors, and a body for each rule."""
