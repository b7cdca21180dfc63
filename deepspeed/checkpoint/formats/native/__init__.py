"""The topology-free format: every rank's fragments as safetensors, and a JSON index of the logical tensors."""
