"""Sweeps over many models: measurement, state file, report.

Each cell is an ordinary load test in a process of its own; no other package of the load tester imports this one.
"""
