"""Admission: who calls and what callers may do, how many calls there are, how large they are, and how often they come.

Nothing here knows a protocol.
"""
