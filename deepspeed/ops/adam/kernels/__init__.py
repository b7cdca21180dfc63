"""Triton kernels of Adam."""
