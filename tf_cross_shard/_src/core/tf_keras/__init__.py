"""The classes of the core for tf_keras (Keras 2).

Three other files also contain code for tf_keras: `wrapped/keras_private.py`,
which reads private attributes of both versions of Keras, and the `tf_keras.py`
of `layers` and `towers`.
"""
