"""XLA's own compilations, read from TensorFlow's log on stderr (`stderr_tap`, `xla_log`) and counted (`compile_watch`).

Imports no TensorFlow: it must be there before TensorFlow is.
"""
