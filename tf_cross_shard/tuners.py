"""KerasTuner on groups: train several trials of an oracle in one `fit`.

`GroupTuner` asks an oracle of KerasTuner for as many trials as there are
groups, trains the trials side by side, one in each group, and reports their
results to the oracle. Install KerasTuner first: `pip install '.[tuner]'` in a
clone.

List the values of a hyperparameter, from which an oracle may choose:

>>> import keras_tuner
>>> from tf_cross_shard import tuners
>>> space = keras_tuner.HyperParameters()
>>> _ = space.Choice("learning_rate", [0.001, 0.01, 0.1])
>>> oracle = keras_tuner.oracles.GridSearchOracle(
...   "val_loss", hyperparameters=space
... )

See `GroupTuner` for an example that trains the trials of such an oracle.
"""

from tf_cross_shard._src import catalogue as _catalogue
from tf_cross_shard._src.search.tuner import GroupTuner

__all__ = ["GroupTuner"]
__dir__ = _catalogue.publish(globals())
