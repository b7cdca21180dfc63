"""Train and serve models larger than your GPUs: one JSON file, no change to the model."""
