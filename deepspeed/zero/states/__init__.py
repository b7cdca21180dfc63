"""What the optimizer updates: pieces of parameters, their masters, moments and gradients."""
