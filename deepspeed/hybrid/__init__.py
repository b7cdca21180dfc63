"""The hybrid engine: one set of weights that trains and generates."""
