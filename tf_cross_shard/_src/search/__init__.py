"""Hyperparameter searches: an Optuna study drives the groups of one `fit`."""
