"""Saves, restores, averages and compares values that differ between groups."""
