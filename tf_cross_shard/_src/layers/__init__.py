"""Keras layers for embedding tables and for groups."""
