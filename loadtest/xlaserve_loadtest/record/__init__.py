"""The run file, in which what was measured and what is reported of it meet.

Imports nothing else of the load tester.
"""
