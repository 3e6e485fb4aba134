"""The classes of the core for Keras 3.

Three other files also contain code for Keras 3: `wrapped/keras_private.py`,
which reads private attributes of both versions of Keras, and the `keras3.py`
of `layers` and `towers`.
"""
