"""Programs that people run: the launcher of a job, and the report about this machine."""
