"""The command line, apart from `tf_cross_shard`, which imports TensorFlow."""
