"""The command line.

It is a separate package because `tf_cross_shard` imports TensorFlow, which
takes seconds.
"""
