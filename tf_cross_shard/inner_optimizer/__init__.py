"""The encapsulated optimizer: how it applies sums of gradients, once.

The private names that both Kerases share stand in this folder; those of one of
them stand in the folder for it.
"""
