"""Parts of the learning-rate schedules: arguments, base class, curves."""
