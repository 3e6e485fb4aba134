"""Runs and compiles TPU programs on machines without a TPU."""
