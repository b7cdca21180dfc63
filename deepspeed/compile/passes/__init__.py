"""The passes over graphs, each with its name, function and contract."""
