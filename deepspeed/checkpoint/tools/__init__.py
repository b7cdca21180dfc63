"""What the commands do: look into checkpoints, check them, change their form; never anything to what they read."""
