"""DeepSpeed's checkpoint files in both directions: their names, their layouts, and nothing that needs its classes."""
