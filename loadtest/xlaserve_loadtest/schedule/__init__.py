"""The schedule of a run: arrivals, payloads, the order of blocks, the search for the highest rate.

Pure and seeded: no clock, no network.
"""
