"""Data efficiency: which samples and tokens training sees at each step, and which layers compute."""
