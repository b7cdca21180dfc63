"""Parts of AutoEP as functions and modules that scripts may call, over the machinery of `moe`."""
