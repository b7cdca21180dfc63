"""Layers that ranks share as modules of their own, made of whole ones: for scripts that put them into a model."""
