"""Hyperparameter search: train many trials in the groups of one `fit`.

A `Table` holds one `Trial` for each combination of hyperparameters.
`callbacks.Halving` trains the trials of a table, one trial per group at a time:
all trials for a few epochs, and then the best ones for longer (successive
halving).

Create a table of four learning rates for two groups:

>>> from tf_cross_shard import groups, trials
>>> learning_rates = [0.1, 0.03, 0.01, 0.003]
>>> table = trials.Table(
...   [{"learning_rate": rate} for rate in learning_rates],
...   groups.singletons(2),
... )
>>> len(table)
4
>>> table[1].settings
{'learning_rate': 0.03}

See `callbacks.Halving` for an example that trains such a table.
"""

from tf_cross_shard._src import catalogue as _catalogue
from tf_cross_shard._src.search.table import Table, Trial

__all__ = ["Table", "Trial"]
__dir__ = _catalogue.publish(globals())
