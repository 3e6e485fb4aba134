"""The classes of the core for tf_keras (Keras 2).

Two other files also contain code for tf_keras: `wrapped/keras_private.py`,
which reads private attributes of both Keras versions, and `towers/tf_keras.py`.
`fit/group_callback.py` has three methods that only tf_keras calls.
"""
