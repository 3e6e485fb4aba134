"""The implementation. Everything here may change without notice.

The modules of `tf_cross_shard` itself name what is public.
"""
