"""Reports for people and programs: terminal, Markdown, HTML, CSV, JSON, Prometheus.

Computes nothing but layout. `chart` and `table` make one of anything; `charts` and `tables` are those that a run has.
"""
