"""One run from its start to its end: processes that send and are watched, and what happened as it happens.

Computes no figure that a report shows.
"""
