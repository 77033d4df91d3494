"""The run file, which a run writes and reports read.

Its modules import nothing else of the load tester but `files`.
"""
