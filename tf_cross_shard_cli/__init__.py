"""The command line.

It is a package of its own because `tf_cross_shard` imports TensorFlow, which
takes seconds.
"""
