"""How the files of a checkpoint are written and read by an object of one's own: `engine.checkpoint_engine = ...`."""
