"""Buckets, the padded batch sizes: the choice of a set of them, and the plan which of them waiting images run in.

Pure functions of costs and demand: no clock, no queue, no program.
"""
