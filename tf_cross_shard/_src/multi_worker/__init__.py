"""Training on several machines, with checks and timeouts."""
