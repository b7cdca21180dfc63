"""The passes over graphs, a module for each; `PASS` is its name, function and contract."""
