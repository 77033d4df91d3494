"""Looking inside what was compiled: programs as text, what they cost, and what they took.

Nothing here takes part in serving, except that `profiler` records while the server runs.
"""
