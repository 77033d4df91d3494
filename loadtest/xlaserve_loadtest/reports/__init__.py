"""Reports for people and programs: terminal, Markdown, HTML, CSV, JSON, Prometheus.

Computes nothing but layout.
"""
