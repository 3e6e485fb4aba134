"""A Keras optimizer that forwards everything but its step to a second one."""
