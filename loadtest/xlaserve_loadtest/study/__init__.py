"""Sweeps over many models: what is measured, what is kept of it, and its report."""
