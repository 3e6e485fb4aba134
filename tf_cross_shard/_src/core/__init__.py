"""The optimizer: what happens to a gradient between a loss and the weights.

Nothing in this folder imports the other folders of `_src`. The contracts of
import-linter in setup.cfg say which modules of the core those may import.
"""
