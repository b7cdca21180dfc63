"""Domino: layers in Megatron's layout over two halves of a batch, one of which computes while the other is summed."""
