"""Precision: dtypes by role, the loss scale, casts, autocast, and the search for overflows."""
