"""What users and clients reach for: whole values, leaf modules, linear layers in tiles, old names."""
