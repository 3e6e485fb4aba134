"""Keras callbacks that treat each of n models separately."""
