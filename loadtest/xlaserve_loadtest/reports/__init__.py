"""Figures as people and programs read them: terminal, Markdown, HTML, CSV, Prometheus.

Computes nothing but layout.
"""
