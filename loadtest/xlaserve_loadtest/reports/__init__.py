"""Reports for people and programs: terminal, Markdown, HTML, CSV, JSON, Prometheus.

This package does only layout. `chart` and `table` make a chart or a table of any data; `charts`, `latency_charts`,
`price_charts`, `tables` and `resource_tables` make those of a run.
"""
