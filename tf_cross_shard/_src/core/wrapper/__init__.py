"""A Keras optimizer that forwards everything except its step to another one."""
