"""One run from start to end: sending processes, their supervision, and a record of events as they happen.

Computes no figure that a report shows.
"""
