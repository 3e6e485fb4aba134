"""The user's optimizer, inside ours: how it is called and how it is saved."""
