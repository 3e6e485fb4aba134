"""Runs the command line for `python -m tf_cross_shard`.

The command `tf-cross-shard` runs the same program. It starts faster, because it
imports TensorFlow only for subcommands that need it.
"""

import sys

from tf_cross_shard_cli.__main__ import main

if __name__ == "__main__":
  sys.exit(main())
