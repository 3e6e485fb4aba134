"""The classes of the core for Keras 3.

Two other files also contain code for Keras 3: `wrapped/keras_private.py`,
which reads private attributes of both Keras versions, and `towers/keras3.py`.
"""
