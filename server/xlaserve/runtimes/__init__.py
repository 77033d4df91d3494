"""All that makes and runs programs: a package for each backend, and `watch`, which sees what XLA compiles.

Knows no models, queues or clients: a program is a function of pixels.
"""
