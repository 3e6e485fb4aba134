"""Hyperparameter search: many trials in the groups of one `fit`."""
