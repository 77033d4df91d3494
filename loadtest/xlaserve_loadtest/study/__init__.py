"""Sweeps over many models: measurement, state file, report."""
