"""Keras callbacks that treat every group as a model of its own."""
