"""Imports of the process that is forked for each worker."""

import sys

# Keras imports them for no other reason than that they are installed, and that
# takes a third of the time that all takes.
sys.modules.update(dict.fromkeys(["jax", "matplotlib", "sklearn"]))

import tests.support.multi_worker_tasks  # noqa: E402, F401
