"""Makes sure that several workers run the same program in the same way."""
