"""The run file: written by a run, read by the reports.

Imports nothing else of the load tester.
"""
