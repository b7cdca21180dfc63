"""Gradient reduction where nothing is sharded."""
