"""Converts optimizers and checkpoints of TensorFlow 1."""
