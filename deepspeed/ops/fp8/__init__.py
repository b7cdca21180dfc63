"""Matrix products of 8-bit floating-point numbers with scales."""
