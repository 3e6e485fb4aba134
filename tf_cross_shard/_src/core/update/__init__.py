"""How the members of a group keep optimizer state and update the weights."""
