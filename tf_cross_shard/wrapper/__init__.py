"""A Keras optimizer that forwards everything but its update step."""
