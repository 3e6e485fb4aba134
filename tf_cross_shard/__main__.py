"""`python -m tf_cross_shard`: the command line, after TensorFlow's import."""

import sys

from tf_cross_shard_cli.__main__ import main

if __name__ == "__main__":
  sys.exit(main())
