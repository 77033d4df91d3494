"""Telemetry: metrics, statistics, logs and traces, and the HTTP endpoint for Prometheus and supervisors.

Gauges of the models are in `models.gauges`.
"""
