"""The optimizer: what happens to a gradient between a loss and the weights.

Nothing in this folder imports the other folders of `_src`, which use it through
`core.internals`.
"""
