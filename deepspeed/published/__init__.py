"""What scripts and other libraries call by old import paths and nothing inside this one needs."""
