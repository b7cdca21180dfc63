"""DeepCompile: gathers, releases and reductions as operations in the graphs of torch.compile, and passes over them."""
