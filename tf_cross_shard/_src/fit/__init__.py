"""Keras callbacks that treat every group as a separate model."""
