"""Warm-up: programs compiled, verified against a reference, timed, and written to the ledger before they serve.

Also beside traffic, for models that are loaded again and resolutions without configured buckets.
"""
