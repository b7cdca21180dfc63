"""Modules of a model that run on fused kernels: recognised by what they compute, replaced without a change of code."""
