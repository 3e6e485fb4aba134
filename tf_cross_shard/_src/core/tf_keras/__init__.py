"""Everything that is private to tf_keras (Keras 2)."""
