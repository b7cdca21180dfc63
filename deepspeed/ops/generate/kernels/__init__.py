"""Triton kernels of text generation."""
