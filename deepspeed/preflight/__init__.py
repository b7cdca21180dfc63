"""Preflight: starts the layout of a job, looks at everything that could stop it or slow it down, and trains nothing."""
