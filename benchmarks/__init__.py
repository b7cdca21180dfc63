"""One runner that compares this library, real DeepSpeed and plain PyTorch: `python -m benchmarks`."""
