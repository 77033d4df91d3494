"""Sweeps over many models: measurement, state file, report.

Each cell is an ordinary load test in a process of its own; nothing else of the load tester knows of sweeps.
"""
