"""The modules that the server of forking.py imports."""

import gc
import sys

# Keras imports these modules only because they are installed. Together they
# take a third of the time of all imports.
sys.modules.update(dict.fromkeys(["jax", "matplotlib", "sklearn"]))

import tests.support.multi_worker_tasks  # noqa: E402, F401

# A garbage collection of a forked process need not look at the modules: that
# would take time, and copy their memory.
gc.freeze()
