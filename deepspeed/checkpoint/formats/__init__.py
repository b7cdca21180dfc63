"""What a checkpoint says: training states as files and files as sources, in the layouts that people have."""
