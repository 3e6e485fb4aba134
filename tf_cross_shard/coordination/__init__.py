"""The cellar of several machines: agreement, its store, and its errors."""
