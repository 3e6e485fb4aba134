"""Pure functions on the gradients of one replica."""
