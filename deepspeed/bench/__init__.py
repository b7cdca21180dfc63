"""`ds_bench`: how fast ranks exchange bytes; the preflight measures with the same parts."""
