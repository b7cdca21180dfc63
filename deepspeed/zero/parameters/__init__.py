"""How parameters come and go: shards, gathers, the plan of a pass, and how ranks agree on it."""
