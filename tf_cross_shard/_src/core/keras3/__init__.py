"""Everything that is private to Keras 3."""
