"""How files of a checkpoint come to the disk and back: durable, checked, by all ranks together, whatever they hold."""
