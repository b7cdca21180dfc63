"""Rows of numbers in few bits: formats, and what encodes, decodes and sums them."""
