"""How gradients leave: arrival, the order that all ranks share, buckets, the way to their owners."""
