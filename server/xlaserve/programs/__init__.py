"""Compiled programs: a package for each backend, the compile cache, and `watch`, which sees what XLA compiles.

Nothing here knows models, queues or clients: a program is a function of pixels.
"""
