"""Embedding tables whose rows are divided among the members of a group."""
