"""Which padded batch sizes there are, and which of them the waiting images run in.

Pure functions of costs and demand: no clock, no queue, no program.
"""
