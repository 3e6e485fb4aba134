"""The encapsulated optimizer: how it applies sums of gradients, once.

Only the files of this folder use private names of Keras.
"""
