"""Runs all replicas of a strategy as one vectorized program on one device."""
