"""The sharded update: each member of a group keeps a part of the state."""
