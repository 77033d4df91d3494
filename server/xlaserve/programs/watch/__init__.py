"""XLA's own events of compilation, read from what it logs on stderr.

Imports no TensorFlow: it must be there before TensorFlow is.
"""
