"""The way of a gradient, from this replica's own to the variables."""
