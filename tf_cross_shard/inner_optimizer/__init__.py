"""How an encapsulated optimizer takes reduced gradients, once.

These are the only files that touch private names of Keras.
"""
