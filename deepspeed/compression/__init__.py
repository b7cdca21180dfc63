"""Quantisation, pruning and smaller students: layers that compute with compressed weights, and what they become."""
